"""Whole objects by key, with an atomic put-if-absent.

Other packages use `store.Store`. It checks the key and hands the object to a backend, `local` (a folder) or `s3`.
`seal` writes small JSON objects that carry their own digest.
"""
