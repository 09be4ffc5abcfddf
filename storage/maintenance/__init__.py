"""Maintenance of a store, called by the commands of `python -m storage`.

`verify` checks versions and all their ancestors; it calls `check_manifest` for the manifest itself. `check_logs` checks
the logs, and `repair` replaces their lost entries. `gc` deletes the data that `retention` does not keep. `doctor` runs
the `probes` on a place before versions are stored there.
"""
