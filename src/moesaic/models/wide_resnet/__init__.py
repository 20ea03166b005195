"""Wide residual networks, dense and with a pMoE layer, and the kernels that only they use."""
