"""Combinations, one file each: how a method makes one number of what it selected."""
