"""Evaluation of policies: accuracies with intervals, comparisons, and the numbers of a run's report.

`task` (Prefect) plays an evaluation set as a `protocol` says, grades the answers and commits both. `outcomes` joins
trajectories with their scores and summarises them. `comparison` compares two policies on the same problems.
`statistics` computes intervals and tests for both. `history` reads a run's metrics and evaluations from the store, and
`summary` turns them into numbers, tables and a plot.
"""
