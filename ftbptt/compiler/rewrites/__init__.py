"""Passes over the graph of one step: before its adjoint is taken, but for ``shared_cat``; and, of
what autograd makes too, ``weights_second``.

``reset_mask`` adds restarts and padding. The others make recurrences smaller: ``hoist_parameters``,
``split_state``, ``split_products``, ``empty``; ``weights_second`` writes products as kernels take
them; ``shared_cat`` makes what is saved smaller.
"""
