"""Bytes: swap files, I/O backends, pinned pools and budgets. Knows nothing of modules."""
