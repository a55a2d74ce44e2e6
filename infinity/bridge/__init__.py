"""Optimizer state in the tiers for parameters that are not offloaded: plain ones, and DTensors such as FSDP2's."""
