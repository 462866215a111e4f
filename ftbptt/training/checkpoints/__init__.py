"""What a run saves: in a ``file`` of one process, or ``shared`` by many ranks."""
