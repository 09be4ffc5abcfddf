"""Workers in other processes: on this host, or on the nodes of a cluster.

A `worker` plays the groups that the flow gives it, and uploads their shards. The `scheduler` is the flow's side: it
attends to all workers, gives each groups as it becomes free, lets them grade, and enters into a `ledger` what they hold
and have stored. `interface` has the calls between both sides. `tasks.cluster` starts the processes.
"""
