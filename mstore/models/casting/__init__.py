"""Casting: a model stored again with elements of another type."""
