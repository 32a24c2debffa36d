"""The proof that two trainings are the same: proofs, audits, replays, comparisons, drills and evaluations."""
