"""Check: whether a store is what it says, and what to do where it is not.

`fsck` reads and changes nothing: every footer against its hash and name, every index row against
a footer entry, every ref and snapshot down to its blocks, the mirror against the refs; with data
also every byte, or a sample.  `repair` puts good copies in the place of what is broken.
`reindex` makes the index anew from packs and the ref mirror.  Nothing is computed: of a virtual
snapshot, the plan and all that it needs must be there.
"""
