"""Check: whether a store is sound, and repair where it is not.

`fsck` reads and changes nothing: it checks every footer against its hash and name, every index row
against a footer entry, every ref and snapshot down to its blocks, and the mirror against the refs;
with data, also every byte or a sample. `repair` replaces what is broken by good copies. `reindex`
rebuilds the index from packs and the ref mirror. Nothing is computed: for a virtual snapshot, the
plan and everything that it needs must be stored.
"""
