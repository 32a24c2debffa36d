"""Where a run's time went, and where it will go: goodput, history, plans, forecasts, and the run's present state."""
