"""Garbage collection and pruning.

    survey    what is dead, and which packs to rewrite: pure, over an inventory
    collect   a whole collection, in the one safe order; copies what is needed out of packs
    proof     checks before anything is removed
    prune     marks the contents of old snapshots as no longer needed

Why nothing is ever lost: docs/design/008-garbage-collection.md.
"""
