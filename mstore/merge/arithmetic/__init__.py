"""What one element becomes: the compiled passes over a chunk."""
