"""Kernels: a scan block -> one function that runs all K steps of it, row by row.

In the order of the data: ``expressions`` (operations as arithmetic), ``accesses`` (what a value is
for one row), ``normalize`` (fewer kinds of nodes), ``lower`` (the block as a ``rowloop``: maps,
reductions and products of rows), ``schedule`` (which of them share a loop), ``cpp`` (the loop in
C++), ``build`` (the C++ as a function); and for a GPU ``tiles`` (what stays in registers),
``triton_source`` (the loop in Triton), ``triton_module`` (a call of it). Up to ``schedule`` no
language is in it.
"""
