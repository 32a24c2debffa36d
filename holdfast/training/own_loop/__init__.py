"""A loop of the user's own: the `Run` that the loop sees, and the engine's part, which gives the loop its steps."""
