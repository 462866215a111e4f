"""Calls of a segment: every cell against the oracle, and all that goes around it."""
