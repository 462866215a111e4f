"""On a GPU, and on an emulation of one."""
