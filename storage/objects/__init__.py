"""Whole objects by key, with an atomic put-if-absent.

Other packages use `store.Store`. It checks the key (`keys`) and hands the object to a backend: `local`, `memory` or
`s3`, which share the protocol in `interface`. `retries` repeats S3 requests. `cache` trims the local copies of the
objects of a remote root. `seal` writes small JSON objects that carry their own digest.
"""
