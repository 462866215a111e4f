"""Text for the character model: which files, which characters, and their codes.

files ── read ──▶ text ── Vocabulary ──▶ codes [N]
"""

from __future__ import annotations

import sysconfig
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNKNOWN = "\ufffd"  # stands for every character outside the vocabulary
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}


class TextError(Exception):
    """The text cannot be used; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Vocabulary:
    """The characters with a code; code 0 is any other character."""

    characters: tuple[str, ...]

    @classmethod
    def of(cls, text: str, size: int) -> Vocabulary:
        """The ``size - 1`` most common characters of ``text`` (ties by code point), and UNKNOWN."""
        counts = Counter(text)
        counts.pop(UNKNOWN, None)
        common = sorted(counts, key=lambda c: (-counts[c], c))[: size - 1]
        return cls((UNKNOWN, *sorted(common)))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The codes of ``text``, int16 [len(text)]."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        table = np.zeros(0x110000, dtype=np.int16)
        for code, character in enumerate(self.characters):
            table[ord(character)] = code
        return torch.from_numpy(table[points])

    def decode(self, codes: Sequence[int]) -> str:
        """The text of ``codes``."""
        return "".join(self.characters[code] for code in codes)


def standard_library_files() -> list[Path]:
    """The Python files of this interpreter's standard library, without its tests.

    The order is a fixed shuffle (by a checksum of the name), so that the held-out end of the text
    is of the same kind as the rest.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*.py")
        if not LEFT_OUT.intersection(file.relative_to(root).parts)
    ]
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return sorted(files, key=lambda file: zlib.crc32(file.relative_to(root).as_posix().encode()))


def read_text(files: Sequence[str | Path] | None) -> tuple[str, str]:
    """(text, what it is): the given files one after the other, or the standard library's source.

    Bytes that are no UTF-8 become UNKNOWN. Raises :class:`TextError` for a file that cannot be
    read and for an empty text.
    """
    has_files = bool(files)
    paths = [Path(file) for file in files] if files else standard_library_files()
    parts = []
    for path in paths:
        try:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            if has_files:
                reason = error.strerror or str(error)
                raise TextError(f"--text: cannot read {path}: {reason}.") from error
    text = "".join(parts)
    if not text and has_files:
        raise TextError(f"--text: nothing in {', '.join(map(str, paths))}; give a text to learn.")
    if not text:
        raise TextError(
            "the source of Python's standard library is not on this machine (it may be zipped or "
            "stripped). Give a text with --text FILE..."
        )
    name = ", ".join(path.name for path in paths) if has_files else "Python's standard library"
    return text, f"{name} ({len(parts)} file{'s' if len(parts) > 1 else ''})"


def split_codes(codes: Tensor, held_out: float, segment: int) -> tuple[Tensor, Tensor]:
    """(training part, held-out last part) of the codes.

    Raises :class:`TextError` when the text is too short for a segment in each.
    """
    held = int(len(codes) * held_out)
    if held < segment + 1:
        need = int((segment + 1) / held_out) + 1
        raise TextError(
            f"the text is too short: {len(codes):,} characters, where segments of {segment} steps "
            f"need at least {need:,}. Give a longer text, or a smaller --segment."
        )
    return codes[:-held], codes[-held:]
