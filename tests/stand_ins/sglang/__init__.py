"""A stand-in for SGLang: the names that mstore's hook uses, as in the source of SGLang 0.5.23.

It finds plugins, applies their hooks, and loads a model by the steps of `DefaultModelLoader`.
"""
