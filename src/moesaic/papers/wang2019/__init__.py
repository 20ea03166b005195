"""Wang et al. 2019: routing by channel."""
