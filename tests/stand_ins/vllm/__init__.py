"""A stand-in for vLLM: the names that mstore's loader uses, as in the source of vLLM 0.33.

It has no server and no kernels.  It finds plugins, keeps loaders by their formats, and loads a
model by the steps of `BaseModelLoader.load_model`.
"""
