"""Recipes that are trained and tested in this repository, and aren't in the wheel."""
