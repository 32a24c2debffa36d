"""Weights that another program has saved: the reading of their files, and the matching of their names."""
