"""Adapters: low-rank fine-tunes in PEFT's form, read as what they make of a base."""
