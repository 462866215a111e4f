"""Passes over the graph of one step: before its adjoint is taken, but for ``shared_cat`` and
what ``weights_second`` does to gradients.

``reset_mask`` adds restarts and padding. The others make recurrences smaller: ``hoist_parameters``,
``split_state``, ``split_products``, ``empty``; or bring them into the form that kernels take:
``weights_second``, ``columns`` and ``shared_matrix``. ``shared_cat`` makes what is saved smaller.
"""
