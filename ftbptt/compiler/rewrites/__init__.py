"""Passes over the graph of one step: before its adjoint is taken, but for ``shared_cat``.

``reset_mask`` adds restarts and padding. The others make recurrences smaller: ``hoist_parameters``,
``split_state``, ``split_products``, ``empty``; ``shared_cat`` makes what is saved smaller.
"""
