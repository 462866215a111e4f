"""For a GPU: ``placement`` decides what stays in registers, and ``kernel`` prints Triton.

It does so by ``loop`` (each program has rows of its own), ``split`` (several share them) or
``scan`` (many steps at once); ``printer``, ``products`` and ``expressions`` are what these have in
common. ``module`` stores what was printed and launches it.
"""
