"""Channel-gated convolution: the masked definition, and inference with the open channels alone."""
