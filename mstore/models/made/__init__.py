"""Models made of models: their files and their snapshots, whoever computes their tensors.

Owns headers, shard indexes, what of a header's metadata stays, how a content becomes a snapshot on
a branch, and what heals after a repair.  Does not own which tensors a model has.
"""
