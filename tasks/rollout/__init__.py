"""The rollout: from problems to trajectories.

`plan` chooses an iteration's problems and prepares its episodes, `collector` plays them (each in a `conversation`),
`admission` checks what agents ask and return, `selection` rejects groups and episodes, `data_set` writes the shards,
and `task` commits them. `play` has the groups of one data set. `stream` has those of a run, without a barrier between
iterations: `assignment` decides which groups may begin and in which data set a finished one belongs.

Who plays are the `workers`: by default this process. A `handout` gives groups to a `worker` in each of many other
processes, by `messages`, keeps its `books` of what they hold, and lets them grade (`scoring_job`); `host_processes`
starts them on this host, `tasks.cluster` on others.
"""
