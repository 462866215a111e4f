"""What a run tells while it goes on: ``events`` call the caller, ``report`` shows numbers."""
