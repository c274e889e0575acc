"""From a plan to a snapshot: tasks, slices, the engine, the memo table, the commit."""
