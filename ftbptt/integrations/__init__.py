"""Adapters to training frameworks, each imported only when asked for."""
