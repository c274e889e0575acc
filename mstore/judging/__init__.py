"""Commands that judge snapshots: evaluations, their scores, and gates before a branch moves."""
