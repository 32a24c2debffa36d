"""A loop of the user's own: what it keeps, and what its steps leave for the next ones."""
