"""Durable steps: every finished step is committed in the swap files, and a later process goes on from there."""
