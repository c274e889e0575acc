"""Searches over merges that are planned and not computed: culprits, and the best weights."""
