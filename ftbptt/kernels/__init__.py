"""Kernels: a scan block -> one function that runs all its K steps, row by row.

A block is lowered to a ``rowloop`` (maps, reductions and products of one row of the batch) by
``lower``, with the help of ``normalize`` (fewer kinds of nodes), ``accesses`` (values and views as
seen by one row) and ``expressions`` (operations as arithmetic). From the row loop,

- for a CPU, ``schedule`` decides which operations share a loop, ``cpp`` prints C++, and ``build``
  compiles and loads it;
- for a GPU, ``tiles`` decides what stays in registers, ``triton_kernel`` prints Triton (by
  ``triton_loop``, ``triton_split`` or ``triton_scan``), and ``triton_module`` stores and launches
  it.

Nothing up to the row loop depends on the target language.
"""
