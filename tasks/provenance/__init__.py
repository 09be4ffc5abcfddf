"""Which checkpoint was trained on which problem, and what is kept out of training.

`updates` reads the checkpoints of a store, `store_lineage` connects them with data sets, scores and problem sets.
`played_trajectories` loads trajectories into DuckDB and computes which of them entered which update.
`problem_lookup` finds the problem that a user means. `questions` answers with the records of `answers`, `proposals`
lists what to exclude, and `commands` prints both.
"""
