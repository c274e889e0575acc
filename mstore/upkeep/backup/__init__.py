"""Copies of a whole store: complete at every moment, and taken while the store is in use.

    source        the store that is copied: protected by a lease, its rows read as of one commit,
                  and what it lacks that an older copy still has
    packs         copies packs, and proves the copies by their ids
    destination   a directory that is a backup of one store, and of no other
    backup        another copy of the same store, updated pack by pack
    clone         another store with the same contents

Why a copy is never half a store: docs/design/013-backup-and-clone.md.
"""
