"""Training from stored data sets alone: `plan` decides which rows each update trains on; the train stage does the rest.

The checkpoints are those of a run like any other, so evaluation, gate, provenance and forks know them.
"""
