"""Infinity: train PyTorch models bigger than GPU and CPU memory together."""
