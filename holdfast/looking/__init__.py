"""What people look at: the report, the watch screen and metric sinks."""
