"""Warnings that point to the caller's line, not into the package."""

from __future__ import annotations

import os
import sys
import warnings

PACKAGE_FOLDER = os.path.dirname(__file__) + os.sep


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the innermost frame outside of the package.

    As ``warnings.warn(..., skip_file_prefixes=...)`` does from Python 3.12 on.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
