"""For a CPU: a row loop -> C++, compiled and loaded.

``schedule`` decides which operations share a loop, ``loop`` and ``nest`` print C++, ``build``
compiles and loads it.
"""
