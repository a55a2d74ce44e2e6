"""Measuring the tiers: drives, host memory, links and optimizer kernels. `infinity bench tier` is its command."""
