"""What a run is trained with: settings, code, packages and files; their records, and how they change."""
