"""Weights from files: what is in them, which parameter each belongs to, and streaming them into the shards."""
