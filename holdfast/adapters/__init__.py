"""Adapters that let other frameworks' training loops run under Holdfast. Importing this package loads none of them."""
