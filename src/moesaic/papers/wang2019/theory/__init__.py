"""What Wang et al. 2019 prove, as functions that cite the theorem, and the same properties measured on data."""
