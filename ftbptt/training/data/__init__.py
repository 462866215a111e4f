"""Data -> windows: which steps an update reads, from where, and how reading goes on later.

``source`` reads windows from tensors, arrays and chunks of any lengths (``chunk_stream``);
``packing`` and ``contiguous`` make sequences and texts into rows; ``cursor`` goes through a source
by the ``windows`` of a truncation.
"""
