"""Copies of a whole store, whole at every moment and taken while the store is in use.

    source        the store that is copied: held by a lease, its rows read as of one commit
    rows          an index with the rows of another
    lacking       what a copy lacks of what its names need, and what an older one still has
    packs         packs copied, and what was copied proved by its ids
    destination   a directory that is a backup of one store, and of no other
    backup        the same store once more: brought up to date, pack by pack
    clone         another store with the same contents

Why a copy is never half a store: docs/design/013-backup-and-clone.md.
"""
