"""Engines inside other libraries' training loops."""
