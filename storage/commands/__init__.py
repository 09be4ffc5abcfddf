"""The commands of `python -m storage`, one module each; `program` runs them.

`arguments` parses command lines and `output` prints tables and JSON, for every command line of the project.
"""
