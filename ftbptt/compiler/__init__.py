"""The compiler: trace the step, take its adjoint, distribute both loops, run their blocks.

The main files in the order of the data flow:

- ``function_overrides``: functions of torch as operations that can be traced;
- ``trace``: step -> graph;
- ``adjoint``: graph -> forward and reverse loop;
- ``distribute``: loop -> blocks, with ``time_reduction``: a sum over the steps -> one GEMM;
- ``program``: runs the blocks of a loop, or is traced by a backend that compiles them.

``plan`` calls all but the last two.
"""
