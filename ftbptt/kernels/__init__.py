"""Kernels: a scan block -> one function that runs all its K steps, row by row.

A block is lowered to a ``rowloop`` (maps, reductions and products of one row of the batch) by
``lower``, with the help of ``normalize`` (fewer kinds of nodes), ``accesses`` (values and views as
seen by one row) and ``expressions`` (operations as arithmetic). From the row loop,
``cpu`` prints, compiles and loads C++, and ``gpu`` prints and launches Triton.

Nothing up to the row loop depends on the target language.
"""
