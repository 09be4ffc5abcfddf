"""Trajectories of other programs as data sets of the store: `python -m tasks.audit import`.

`rollout` reads a row of a dump as a `Rollout`, whatever program wrote it, and makes a trajectory of it. `command`
commits the problem set, a data set for each step, and scores. What the rows of a data set lack is in its manifest (the
metric `lacks`), and checks that need it leave that data set out.
"""
