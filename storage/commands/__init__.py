"""The commands of `python -m storage`: each module adds its arguments, does its work and returns an `Output`."""
