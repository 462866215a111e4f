"""A row loop -> the source of a Triton module, with the kernel that suits it."""

from __future__ import annotations

import torch

from ..expressions import Unsupported
from ..rowloop import RowLoop
from .affine import affine_next
from .exchanges import with_fewer_exchanges
from .loop import LoopPrinter
from .placement import make_tiles
from .scan import print_scan
from .split import Sharing, SplitPrinter, choose_sharing, weight_bytes

# Of an H100: multiprocessors, and the shared memory that a program can have. Triton needs a part of
# it to change the layout of rows.
_PROCESSORS, _SHARED_BYTES, _SHARED_BYTES_OF_ROWS = 132, 227 << 10, 35 << 10
# A meeting takes about as long as a graph takes to launch a kernel, and a compiled step is a few.
_MOST_MEETINGS = 4


def print_triton(loop: RowLoop) -> str:
    """print_triton : RowLoop -> source of a module with the kernel

    The kernel is ``run(*memory, *workspace, *numbers, ROWS, PRECISION)``, with ``memory`` and
    ``numbers`` as in ``cpu.loop``. Constants of the module:

    - ``WORKSPACE``: the tensors to allocate for a launch, as (dtype, elements per row, whether it
      has K + 1 slots, as a history).
    - ``AXES``: the number of row axes. ``GROUPED``: those along which a weight varies; a program
      has rows of one group only.
    - ``ROW_BYTES``: size of a row of the widest tile.
    - ``EXACT``: whether, without TF32, some products cannot use a matrix unit.
    - ``PARTS``: the programs that share a tile of rows. If there are several, the kernel has an
      argument ``arrivals`` after the workspace, for each tile ``COUNTER`` integers that are zero,
      and the module has constants ``WARPS`` and ``TILE_ROWS``, of which without TF32
      ``EXACT_ROWS`` may do.

    If the steps compose there is also ``run_composed``. Raises Unsupported.
    """
    loop, sharing = _shared_out(loop)
    if sharing is not None:
        printer = SplitPrinter(loop, sharing)
        text = printer.text()
        if printer.meetings > _MOST_MEETINGS:
            raise Unsupported(
                f"split, its {sharing.parts} programs would wait for each other "
                f"{printer.meetings} times a step"
            )
        return text
    text, affine = LoopPrinter(loop).text(), affine_next(loop)
    return text if affine is None else text + print_scan(loop, affine)


def describe_triton(loop: RowLoop) -> str:
    """describe_triton : RowLoop -> what its kernel is"""
    kernel, (_, sharing) = "one generated Triton kernel for all steps", _shared_out(loop)
    if sharing is None:
        return kernel
    return f"{kernel}, its weights split over {sharing.parts} programs"


def _shared_out(loop: RowLoop) -> tuple[RowLoop, Sharing | None]:
    """The loop to print, and how programs share rows; None if one holds all weights."""
    processors, shared_bytes = _sizes()
    needed = weight_bytes(loop, make_tiles(loop, 1))
    available = shared_bytes - _SHARED_BYTES_OF_ROWS
    if needed <= available:
        return loop, None
    loop = with_fewer_exchanges(loop)
    try:
        return loop, choose_sharing(loop, processors, shared_bytes, _has_matrix_unit(loop))
    except Unsupported as reason:
        raise Unsupported(
            f"its weights need {needed >> 10} KB of a multiprocessor's shared memory, which has "
            f"{available >> 10} KB for them; {reason}"
        ) from None


def _has_matrix_unit(loop: RowLoop) -> bool:
    """Whether products are for tensor cores, by the dtypes of their weights and torch's setting."""
    dtypes = set(loop.weight_dtypes.values())
    has_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return all(d.itemsize == 2 or (d is torch.float32 and has_tf32) for d in dtypes)


def _sizes() -> tuple[int, int]:
    """The multiprocessors, and the bytes of shared memory that a program can have."""
    if not torch.cuda.is_available():
        return _PROCESSORS, _SHARED_BYTES
    device = torch.cuda.get_device_properties()
    # The attribute is missing in torch's type stubs, and on AMD devices.
    default = device.shared_memory_per_block
    optin = getattr(device, "shared_memory_per_block_optin", default)
    return device.multi_processor_count, optin
