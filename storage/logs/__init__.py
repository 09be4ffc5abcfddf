"""Numbered logs: 00000000.json, 00000001.json … Each entry is created once and never changed.

`log.Log` appends and reads, and checks the fields of each kind of entry; put-if-absent at a free number is a
compare-and-swap. The logs are the `catalog` (every attempt to commit), `leases` (who may write a run) and `nights`
(scheduled retraining). Aliases (`storage.versions.aliases`) and journals (`storage.versions.drafts`) are numbered logs,
too.
"""
