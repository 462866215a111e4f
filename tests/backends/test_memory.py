"""What a segment frees is kept for the next one, not returned to the system."""

from __future__ import annotations

import platform

import pytest
import torch

from ftbptt.backends.compile import _keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_not_faulted_in_again() -> None:
    import resource  # not everywhere

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def allocate() -> int:
        return len([torch.ones(24 << 20, dtype=torch.uint8) for _ in range(8)])

    _keep_freed_memory()
    for _ in range(3):
        before = faults()
        allocate()
    pages = (8 * 24 << 20) // resource.getpagesize()
    assert faults() - before < pages / 4
