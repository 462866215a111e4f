"""Runs on streams."""
