"""Adapters to training frameworks; none is imported unless the program imports it."""
