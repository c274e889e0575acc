"""Combinations: one adapter made of several, by their factors or by their products."""
