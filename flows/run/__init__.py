"""The parts that all stages of a run share.

`configuration` loads and checks the configuration, and describes a run without starting it. `check` plays a scripted
episode before a new run. `workspace` opens a run
under its lease, refuses a configuration that differs from the one the run began with, and iterates over the remaining
iterations. `resources` opens engine, verifier and trainer for the duration of a flow. `report` writes the report at the
end. `room` compares what checkpoints need with what is free, and says what a full disk means.
"""
