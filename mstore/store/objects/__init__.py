"""Records: the canonical bytes of tensors, manifests, snapshots, plans and coverage."""
