"""Planning, from a request to a plan: survey inputs, score blocks, select reads, set thresholds."""
