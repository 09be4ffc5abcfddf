"""What the stages of a run share: its configuration, store, servers and progress.

`configuration` resolves what the user gave. `opening` opens the run's `workspace` under its lease, and refuses another
configuration than the one it began with. `progress` says which iterations are left. `resources` opens engine, verifier
and trainer for the length of a flow. `report` writes the run's report at the end.
"""
