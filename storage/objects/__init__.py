"""Whole objects by key, with an atomic put-if-absent.

`store.Store` is what everything else uses. It checks the key (`keys`) and hands the object to a backend: `local`,
`memory` or `s3`, which share the protocol in `interface`. S3 requests are repeated by `retries`. `cache` trims the
local copies of a remote store's objects; `seal` writes small JSON objects that carry their own digest.
"""
