"""Text as bytes, and the batches that a run takes from it."""
