"""Virtual merges: committed as plans, computed when they are read."""
