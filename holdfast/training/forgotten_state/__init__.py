"""The search for state that no checkpoint has, which explains a difference that a rehearsal has found."""
