"""Selections, one file each: what of an expert a method takes."""
