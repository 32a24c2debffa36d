"""The views of a run for people: the report, the watch screen and metric sinks."""
