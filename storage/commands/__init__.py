"""The commands of `python -m storage`, one module each; see `program`.

`arguments` reads command lines and `output` prints tables and JSON, for every command line of the project.
"""
