"""The commands of `python -m tasks.provenance`; see `storage.commands.program`."""
