"""Workers in other processes: several of this host (`rollout.processes`), or one on each node of a cluster.

`worker` plays the groups that the flow gives it, and uploads their shards. `handout` is the flow's side: it attends to
all workers, gives each groups as it becomes free (`shared_rollout`), enters into its `books` what they hold and have
stored, and lets them grade (`scoring_job`). Both sides know only `messages`. A `host_worker` is a worker with engine,
verifier, store and cache. `host_processes` starts them on this host, each with its share (`shares`) of the servers, as
a `host_process`; `tasks.cluster` starts them on nodes. After `losses` another one may start in the same place.

One thread attends to a thousand workers because both sides are patient: a worker reports what can wait together with
what cannot, and asks for several short groups at once (`appetite`). `tests.simulation` tells how far this reaches.
"""
