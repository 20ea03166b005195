"""The data distributions and datasets of Chen et al. 2022: synthetic clusters, rotated CIFAR-10, sentences."""
