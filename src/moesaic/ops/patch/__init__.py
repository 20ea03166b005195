"""Patch routing in plain torch: gather, scatter convolution, CPU inference."""
