"""What one element becomes: operators, their parameters, and the compiled passes over a chunk."""
