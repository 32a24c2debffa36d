"""Virtual ranks: a step whose bits don't depend on the number of ranks that train it."""
