"""The store proper: layout, catalog, transactions, refs, leases.  No checkpoints, no merging."""
