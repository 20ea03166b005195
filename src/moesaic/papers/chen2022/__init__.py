"""Chen et al. 2022: routing by sample."""
