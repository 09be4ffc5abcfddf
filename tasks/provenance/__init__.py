"""Which checkpoint was trained on which problem, and what is kept out of training.

`index` reads checkpoints, data sets and problem sets of a store, and computes which trajectories entered which update.
`questions` answers from it and lists what to exclude, and `__main__` prints the answers.
"""
