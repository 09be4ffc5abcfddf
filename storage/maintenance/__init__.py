"""Maintenance of a store, called by the commands of `python -m storage`.

`verify` checks versions and all their ancestors, and the logs, and replaces lost entries of the catalog. `gc`
deletes the data that no rule keeps. `doctor` tries out a root before versions are stored there. `copying` takes a run
to another root; `export` makes a checkpoint a folder for others, with a model card.
"""
