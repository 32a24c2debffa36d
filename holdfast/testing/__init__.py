"""Test support for users: a conformance suite for stores, and faults that kill a run at a named point."""
