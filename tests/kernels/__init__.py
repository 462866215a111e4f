"""Kernels of scan blocks, in C++ and in Triton."""
