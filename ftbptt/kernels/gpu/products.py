"""The products of a step, of a tile of rows and a weight, in Triton.

A program loads its part of the weights before the loop. A product is computed in the pieces that
``placement`` asks for, and as a sum where its row is in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..accesses import contiguous
from ..rowloop import Product, Read, RowLoop, Value, compute_dtype
from .expressions import TYPES, type_of
from .placement import Space, columns, flat
from .printer import TilePrinter, name_of

# What is read of a row, its indices, and its offset in the row; a tile, its offset and its columns.
RowPiece = tuple[Read, Space, int]
RowTile = tuple[str, int, int]


class ProductPrinter(TilePrinter):
    def __init__(self, loop: RowLoop, parts: int = 1) -> None:
        super().__init__(loop, parts)
        self.weights: dict[Any, str] = {}  # the variables of their tiles

    def _product(self, op: Product) -> None:
        row: Iterable[RowTile] = self._row(op)
        if len(self.tiles.pieces[op.value]) > 1:  # each of them reads the whole row
            row = list(row)
        for offset, length in self.tiles.pieces[op.value]:
            self._product_columns(op, row, offset, length)
            self._round_what_is_read_back(op.value, name_of(op.value, offset, length))
        if not self.tiles.is_stored(op.value):
            return
        if (0, op.n) in self.tiles.pieces[op.value]:
            self.body.append(f"{name_of(op.value)} = {name_of(op.value, 0, op.n)}")
            self._store(op.value)
            return
        for offset, length in self.tiles.stored_pieces(op.value):
            space = self.tiles.flat(length)
            index = self._index(space, op.value.offset + offset, contiguous(space.shape))
            self._store_at(op.value, space, index, name_of(op.value, offset, length))

    def _row(self, op: Product) -> Iterator[RowTile]:
        """The tiles that the row is read in, each with its offset in the row and its length.

        What is read from memory is loaded when the first of its batch is asked for.
        """
        pieces = self.tiles.row_pieces(op)
        if pieces is not None:
            for value, first in pieces:
                yield self._with_zero_padding(self._all_columns(value), first, value.size)
            return
        for batch in self._batches(op, self.tiles.rows_of(op)):
            tiles = [self._tile(self._read(read, space), space) for read, space, _ in batch]
            for tile, (_, space, first) in zip(tiles, batch, strict=True):
                yield self._with_zero_padding(tile, first, space.inner_size)

    def _batches(self, op: Product, row: list[RowPiece]) -> list[list[RowPiece]]:
        """The pieces of a row that are loaded at once, before any of them is multiplied."""
        return [row]

    def _with_zero_padding(self, tile: str, first: int, k: int) -> RowTile:
        padded = columns(k) != k
        return f"tl.where({self._space(flat(k))}_in, {tile}, 0)" if padded else tile, first, k

    def _product_columns(
        self, op: Product, row: Iterable[RowTile], offset: int, length: int
    ) -> None:
        """A piece of a product's columns, as the sum over the tiles of its row."""
        for i, tile in enumerate(row):
            self._add_product(op, tile, offset, length, is_first=i == 0)

    def _add_product(
        self, op: Product, tile: RowTile, offset: int, length: int, is_first: bool
    ) -> None:
        a, k_first, k = tile
        name = name_of(op.value, offset, length)
        weight = self._weight(op, k_first, k, offset, length)
        self.body.append(f"{name} = {self._dot(op, a, k, length, weight, name, is_first)}")

    def _all_columns(self, value: Value) -> str:
        return name_of(value, 0, value.size) if value in self.tiles.pieces else name_of(value)

    def _dot(self, op: Product, a: str, k: int, n: int, weight: str, name: str, first: bool) -> str:
        """``a`` [rows, k] @ ``weight`` [k, n], added to ``name`` if it is not the ``first``."""
        weight_dtype = self.loop.weight_dtypes[op.weight]
        kind = type_of(compute_dtype(op.value.dtype))
        if k == 1 or n == 1:
            product = f"{a} * {weight}.to({kind})"
            if k != 1:
                product = f"tl.sum({product}, 1)[:, None]"
            return product if first else f"{name} + {product}"
        if weight_dtype is torch.float64:
            # Triton derives a product's layout from the narrowest load that an operand depends on,
            # such as a mask, and has no layout for float64 below 32 bits (3.6, 3.7). A sum hides
            # the load.
            a = f"tl.sum(({a})[:, :, None], 2)"
        accumulator = "" if first else f", acc={name}"
        return (
            f"tl.dot({self._factor(op, a)}, {weight}{accumulator}, "
            f"input_precision=PRECISION, out_dtype={kind})"
        )

    def _factor(self, op: Product, x: str) -> str:
        """What a matrix unit multiplies, in the dtype of the weight.

        It cuts a float32 off to TF32, which in a sum of many products is an error of one sign
        (Triton leaves it at that: 3.6, 3.7). cuBLAS rounds, and so does ``rounded``.
        """
        dtype = self.loop.weight_dtypes[op.weight]
        x = f"{x}.to({TYPES[dtype]})"
        return f"rounded({x}, PRECISION)" if dtype is torch.float32 else x

    def _weight(self, op: Product, k_first: int, k: int, n_first: int, n: int) -> str:
        """The variable with the tile [k, n] of a weight, or [1, k] if it has one column.

        ``k_first`` and ``n_first``: the row and column of the weight where the tile starts.
        """
        # A weight of both may vary along the groups of rows in one product, along heads in another.
        key = (op.weight, op.grouped, op.trailing, k_first, k, n_first, n)
        if key in self.weights:
            return self.weights[key]
        name = self.weights[key] = f"w{len(self.weights)}"
        w, space = op.weight, flat(k) if n == 1 else self.tiles.flat(n)
        column = self._space(space)
        masks = [f"{column}_in"] if space.is_padded else []
        if n == 1:
            offset = f"({k_first} + {column}) * k_stride{w} + {n_first} * n_stride{w}"
        else:
            offset = f"({n_first} + {column}) * n_stride{w}"
            rows = f"tl.arange(0, {columns(k)})[:, None]"
            offset += f" + ({k_first} + {rows}) * k_stride{w}"
            masks += [f"({rows} < {k})"] if columns(k) != k else []
        if op.grouped or op.trailing:
            offset += f" + ({self._batch_index(op)}) * group_stride{w}"
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        loaded = f"tl.load(weight{w} + {offset}{mask})"
        is_matrix = k != 1 and n != 1
        self.prologue.append(f"{name} = {self._factor(op, loaded) if is_matrix else loaded}")
        return name

    def _batch_index(self, op: Product) -> str:
        """Which of the weights of a batch the program has.

        ``group`` and ``head`` count along all axes along which some weight varies.
        """
        after = " * ".join(self._axis_names()[op.grouped : self.loop.grouped]) or "1"
        index = f"group // ({after})" if op.grouped else "0"
        if op.trailing:
            heads = self._last_axes(op.trailing)
            index = f"{index} * ({heads}) + head % ({heads})"
        return index

    def _last_axes(self, count: int) -> str:
        names = self._axis_names()
        return " * ".join(names[len(names) - count :])
