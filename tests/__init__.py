"""Tests of ftbptt: one table of cells (`cells.py`), one oracle (`oracle.py`), crossed with everything."""
