"""The rollout: from problems to trajectories.

`plan` chooses an iteration's problems and prepares its episodes, `collector` plays them (each in a `conversation`),
`admission` checks what agents ask and return, `selection` rejects groups and episodes, `play` writes the shards, and
`task` commits them.
"""
