"""The compiler: trace the step, take its adjoint, distribute both loops, build the program.

The main files in the order of the data flow: ``composed`` (functions of torch as plain operations)
-> ``trace`` (step -> graph) -> ``adjoint`` (graph -> forward and reverse loop) -> ``distribute``
(loop -> blocks) -> ``timesum`` (a sum over steps -> one GEMM) -> ``program`` (blocks -> functions).
``plan`` calls them all.
"""
