"""Faults for our tests, and for those of users' own recipes."""
