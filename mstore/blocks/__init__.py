"""Blocks at rest: codecs, packs and the index.  Knows nothing of snapshots or merges."""
