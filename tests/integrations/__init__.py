"""Ignite and Lightning."""
