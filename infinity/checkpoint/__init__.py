"""Checkpoints: the state of a run in a folder, by parameter name."""
