"""The compiler: trace the step, take its adjoint, distribute both loops, run their blocks.

In the order of the data flow:

- ``tracing``: step -> graph, and ``rewrites`` of that graph;
- ``loss``: the caller's loss -> graphs of its value and of its gradient;
- ``adjoint``: graph -> forward and reverse loop;
- ``distribute``: loop -> blocks, with ``time_axis``: what has no recurrence, for all steps at once;
- ``run_loop``: runs the blocks of a loop, or is traced by a backend that compiles them.

``plan`` calls all but the last two.
"""
