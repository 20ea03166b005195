"""What Chen et al. 2022 prove, as functions that cite the theorem, and the same properties measured on data."""
