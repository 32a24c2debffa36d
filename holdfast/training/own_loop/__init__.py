"""A loop of the user's own: the `Run` that it sees, and the engine's part, which gives it steps."""
