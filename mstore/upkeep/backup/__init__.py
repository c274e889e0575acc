"""Copies of a whole store: complete at every moment, and taken while the store is in use.

    copying       rows as of one commit, packs, proofs by ids, and what an older copy still has
    destination   a directory that is a backup of one store, and of no other
    backup        another copy of the same store, updated pack by pack; or a new store

Why a copy is never half a store: docs/design/013-backup-and-clone.md.
"""
