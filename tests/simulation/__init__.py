"""Rollouts over many workers in virtual time: the flow's scheduler is real, the workers and the store are not.

`clock` has the virtual time: the flow's event loop, whose clock jumps to the next event, and the events of everything
else. `store` keeps objects in memory, counts requests, and says how long they would take. `worker` answers as
`tasks.rollout.remote.worker` does, but its episodes only last. `cluster` has the workers that join and are lost, and
measures. `scenario` plays an iteration or a stream with all of them. `python -m tests.simulation --help`
"""
