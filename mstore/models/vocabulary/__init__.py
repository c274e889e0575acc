"""Vocabularies: one order of tokens for models whose tokenizers differ."""
