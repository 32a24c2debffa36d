"""Is it the same training? Proofs, audits, replays, comparisons, drills and evaluations."""
