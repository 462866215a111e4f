"""A segment that trains: what the caller asks for, compiled when it is first called, and run.

A call passes through these, in this order: ``make_segment``, ``train_segment``, ``arguments`` (the
caller's, checked by ``argument_checks``, with time in front), ``executables`` (a plan and a backend
for it), ``execute`` (runs its ``phases``, in one program or chunk by chunk), ``programs`` (the
compiled functions). ``call_cache`` and ``consecutive_calls`` skip checks of calls that were seen
before; ``capture`` makes a CUDA graph of one.
"""
