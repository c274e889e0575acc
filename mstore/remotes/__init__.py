"""Remotes: a family of models in object storage or a shared directory; push, fetch, pull."""
