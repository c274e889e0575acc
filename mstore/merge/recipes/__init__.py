"""Recipes: merges as mergekit's YAML describes them, read into requests and written from plans."""
