"""The inputs of a run: settings, code, packages and files. How they are recorded, and how changes are found."""
