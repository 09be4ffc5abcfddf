"""Workers in other processes, perhaps on other hosts: one plays and grades on each node of a cluster.

`worker` plays the groups that the flow gives it, and uploads their shards. `handout` is the flow's side: it attends to
all workers, gives each groups as it becomes free (`shared_rollout`), enters into its `books` what they hold and have
stored, and lets them grade (`scoring_job`). Both sides know only `messages`; `tasks.cluster` starts the processes.

One thread attends to a thousand workers because both sides are patient: a worker reports what can wait together with
what cannot, and asks for several short groups at once (`appetite`). `tests.simulation` tells how far this reaches.
"""
