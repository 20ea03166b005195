"""Chowdhury et al. 2023: routing by patch."""
