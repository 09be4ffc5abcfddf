"""The commands of `python -m tasks.audit`; see `storage.commands.program`."""
