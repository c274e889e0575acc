"""Snapshots: add and check out, compare, follow their lineage, note and sign."""
