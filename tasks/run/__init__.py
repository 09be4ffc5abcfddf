"""The parts that all stages of a run share: configuration, workspace, resources, progress and report.

`configuration` loads and checks the configuration. `opening` opens the run's `workspace` under its lease, and refuses a
configuration that differs from the one the run began with. `progress` iterates over the remaining iterations.
`resources` opens engine, verifier and trainer for the duration of a flow. `report` writes the report at the end.
"""
