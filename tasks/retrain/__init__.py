"""Scheduled retraining, used by `flows.retrain`: the night's problems, the gate, and the reports.

`night_task` (Prefect) opens and ends a night; `planning` chooses its problems and makes its configuration. `gate_task`
measures the challenger and moves the champion's alias; `evidence` gathers the numbers, and `gate` decides.
`report_task` reports the night, with the texts of `night_report` and the history of `timeline`. `commands` holds the
commands of `python -m flows.retrain` that do not run the flow.
"""
