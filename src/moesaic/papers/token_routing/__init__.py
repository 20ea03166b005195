"""Claims of our own: routing by token in vision transformers on CIFAR-10."""
