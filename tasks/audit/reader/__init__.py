"""The reader: a small web app on this machine in which people browse trajectories.

`read` is the command: it opens the data sets and serves `app`, which it protects with a key. A view (`views`) parses
the address into a filter, asks the `library` for trajectories, and renders a template. `tokens` prepares the tokens of
a trajectory. Pages contain no script, and a header forbids the browser to run any, so hostile text in the data cannot
run.
"""
