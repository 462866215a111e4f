"""The main job (``python -m bench.charlm``) and the bench (``python -m bench.run``)."""
