"""Registries of OCI artifacts: addresses, credentials, requests, manifests, layers."""
