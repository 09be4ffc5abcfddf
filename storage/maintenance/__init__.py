"""Looking after a store: `python -m storage` calls these.

`verify` checks versions and everything they were made from; `check_manifest` checks the record itself, `check_logs` the
logs. `repair` fills what the logs have lost. `gc` deletes what `retention` says nobody needs. `doctor` runs the
`probes` on a place before it is trusted with versions.
"""
