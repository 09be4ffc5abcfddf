"""The rollout: from problems to trajectories.

`plan` chooses an iteration's problems and prepares its episodes, `collector` plays them (each in a `conversation`),
`admission` checks what agents ask and return, `selection` rejects groups and episodes, `play` writes the shards, and
`task` commits them. `stream` plays without a barrier between iterations: `assignment` decides which groups may begin
and in which data set a finished one belongs, `stream_data` writes and commits these data sets.
"""
