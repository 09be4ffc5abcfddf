"""Workers in other processes, perhaps on other hosts: one plays and grades on each node of a cluster.

`worker` plays the groups that the flow gives it, and uploads their shards. `handout` is the flow's side: it attends to
all workers, gives each groups as it becomes free (`shared_rollout`), enters into its `books` what they hold and have
stored, and lets them grade (`scoring_job`). Both sides know only `messages`; `tasks.cluster` starts the processes.
"""
