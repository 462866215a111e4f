"""What a segment means, apart from how it runs.

``step`` (one time step), ``as_step`` (makes one of a module, a cell or a function),
``held_tensors`` (others in the place of a module's own), ``taps`` (what is looked at inside a
step), ``loss``, ``layout`` (where time and rows lie in the caller's data), ``output`` (what comes
back), and ``reference``: the whole as a plain loop in eager torch.
"""
