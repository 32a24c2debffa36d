"""Recipes on real data, with nothing to download."""
