"""Statistics of deltas: pure functions of (base, expert), measured once and kept for ever."""
