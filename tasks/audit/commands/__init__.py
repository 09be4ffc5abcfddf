"""The commands of `python -m tasks.audit`: each module adds its arguments, does its work and returns an `Output`."""
