"""Triton kernels that only wide residual networks use: thin convolutions and the first shortcut."""
