"""One table of cells (`cells.py`) and one oracle (`oracle.py`), crossed with everything."""
