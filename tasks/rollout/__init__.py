"""The rollout: from problems to trajectories.

`plan` chooses an iteration's problems and prepares its episodes. `collector` plays them: each is a `conversation`,
whose agent asks for `turns`. `admission` checks what agents ask and return, and `outcomes` rejects groups and episodes
and counts them. `play` has the groups of one data set, which `flows.stages.rollout` commits. `stream` has those of a
run, without a barrier between iterations: `places` decides which groups may begin and in which data set a finished
one belongs. `guards` bounds what an agent can do to the others. `scripted` plays a scripted episode, which needs no
policy.

The `workers` play: by default this process. In `remote`, a `scheduler` gives groups to workers in other
processes, which `tasks.cluster` starts.
"""
