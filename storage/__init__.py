"""Versions in object storage: records, layout, manifests, data sets and checkpoints. The contract between stages."""
