"""Adapters that let other frameworks' training loops run under Holdfast. Importing this imports no framework."""
