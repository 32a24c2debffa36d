"""The proof that two trainings are the same: proofs, audits, replays, comparisons and evaluations."""
