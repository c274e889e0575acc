"""Selections that several methods share: what of an expert a method takes."""
