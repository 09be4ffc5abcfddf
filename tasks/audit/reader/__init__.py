"""The reader: a small web app on this machine in which people browse trajectories.

`serve` opens the data sets and starts `app`, which `key` protects. A view (`lists`, `trajectory`) parses the address
with `filters`, asks the `library` (`query` writes its SQL) and renders a template with `pages`. `tokens`, `vocabulary`,
`colours` and `advantages` prepare the tokens of a trajectory. Pages contain no script, and a header forbids the
browser to run any, so hostile text in the data cannot run.
"""
