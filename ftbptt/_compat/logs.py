"""What torch logs while it traces and compiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_log(logger: str, words: str) -> Iterator[None]:
    """Within it, torch does not log messages with these words, of which users can make nothing.

    The names of its loggers are those of its modules (2.11 to 2.13).
    """

    def wanted(record: logging.LogRecord) -> bool:
        return words not in str(record.msg)

    logging.getLogger(logger).addFilter(wanted)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(wanted)
