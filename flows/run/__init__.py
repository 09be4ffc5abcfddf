"""The parts that all stages of a run share.

`configuration` loads and checks the configuration, and describes a run without starting it. `check` plays a scripted
episode before a new run. `workspace` opens a run under its lease, refuses a configuration that differs from the one
that the run began with, makes versions (`Workspace.stage`), and says what a full disk means. `progress` iterates over
the remaining iterations, and writes the report at the end. `resources` opens workers and trainer for the duration of a
flow.
"""
