"""Scheduled retraining, used by `flows.retrain`: the night's problems, the gate, and the reports.

`task` (Prefect) opens a night, gathers the numbers of the challenger, and ends and reports the night. `planning`
chooses its problems and makes its configuration; `gate` decides; `report` writes the night's report
and the timeline of champions. `commands` holds the commands of `python -m flows.retrain` that do not run the flow.
"""
