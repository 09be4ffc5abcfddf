"""Scheduled retraining, used by `flows.retrain`: the night's problems, the gate, and the reports.

`task` (Prefect) opens a night, decides, and ends and reports it. `planning` chooses its problems and makes its
configuration; `evidence` gathers the numbers of the challenger, and `gate` decides; `report` writes the night's report
and the timeline of champions. `commands` holds the commands of `python -m flows.retrain` that do not run the flow.
"""
