"""Mixtures of experts (MoE) of dense models: recipes of mergekit-moe as assemblies by hash."""
