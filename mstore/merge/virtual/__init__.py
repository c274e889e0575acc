"""Merges that are committed as plans, and computed when somebody reads them."""
