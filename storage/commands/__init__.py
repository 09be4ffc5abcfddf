"""The commands of `python -m storage`: `versions` shows versions and moves aliases, `maintenance` checks, cleans
and copies.

`program` parses command lines and prints tables and JSON, for every command line of the project.
"""
