"""I/O backends. `base` is their contract, `probe` chooses one for a directory."""
