"""Pins: snapshots whose blocks lie raw and in file order, so that they can be mapped.

    positions  the blocks of a snapshot in file order, and which to copy, so that runs become long
    rewriting  new places for stored blocks, published in one index transaction
    pin        rewrites a snapshot's blocks raw, or codes them again

A pin is about how blocks lie.  It keeps nothing from garbage collection: that is what refs and
holds (`mstore.store.leases`) are for.  Reasons: docs/design/029-pins.md.
"""
