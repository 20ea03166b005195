"""The data distributions and datasets of Chowdhury et al. 2023: MNIST patches, synthetic patterns, CIFAR-10 mosaics."""
