"""The search for state that no checkpoint contains. It explains a difference that a rehearsal has found."""
