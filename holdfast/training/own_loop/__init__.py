"""A user's own training loop: the `Run` that the loop gets, and the engine behind it, which yields the steps."""
