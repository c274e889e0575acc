"""Garbage collection and pruning.

    survey    what is dead, and which packs to rewrite: pure, over an inventory
    repack    copying what is needed out of a pack
    collect   the whole of it, in the one safe order
    tidy      rows of the memo table and of statistics whose subject is gone
    prune     letting the contents of old snapshots go

Why nothing is ever lost: docs/design/008-garbage-collection.md.
"""
