"""The reader: a small web app on this machine in which people browse trajectories.

`python -m tasks.audit read` opens the data sets and serves it. A view (`views`) parses the address into a filter, asks
the `library` for trajectories, and renders a template. `tokens` prepares the tokens of a trajectory. `serving` is what
the reader shares with `tasks.watch`: a key protects the pages, they contain no script, and a header forbids the browser
to run any, so hostile text in the data cannot run.
"""
