"""Adapters: other frameworks' training loops as programs of a run."""
