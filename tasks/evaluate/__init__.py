"""Evaluation of policies: accuracies with intervals, comparisons, and the numbers of a run's report.

`task` (Prefect) plays an evaluation set as a `protocol` says, grades the answers and commits both. `outcomes` joins
trajectories with their scores, summarises them, and compares two policies on the same problems. `statistics` computes
intervals and tests for both. `learning_curve` reads the numbers of a run's report from the store, and plots
them, and `summary` turns numbers into tables.
"""
