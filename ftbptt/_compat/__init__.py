"""Every torch-private name this package uses, with the reason and the versions it was read in.

Nothing else in the package imports a private torch module. Read in torch 2.11, 2.13 and 2.14; all
tests pass with 2.15 too.
"""
