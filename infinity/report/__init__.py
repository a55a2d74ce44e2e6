"""One page about one run."""
