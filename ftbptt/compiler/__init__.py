"""The compiler: trace the step, take its adjoint, distribute both loops, build the program.

The main files in the order of the data flow:

- ``function_overrides``: functions of torch as operations that can be traced;
- ``trace``: step -> graph;
- ``adjoint``: graph -> forward and reverse loop;
- ``distribute``: loop -> blocks, with ``time_reduction``: a sum over the steps -> one GEMM;
- ``program``: blocks -> functions on sequences.

``plan`` calls all but the last; a backend runs the programs.
"""
