"""Neurons: what a model may have in another order and compute the same, and matching two models."""
