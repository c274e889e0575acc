"""Recipes: merges as mergekit's YAML and sd-mecha's files describe them, read into requests, and
written from plans as mergekit's.
"""
