"""Combinations that several methods share: how a method makes one number of what it selected."""
