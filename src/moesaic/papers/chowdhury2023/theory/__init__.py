"""What Chowdhury et al. 2023 prove, as functions that cite the theorem, and the same properties measured on data."""
