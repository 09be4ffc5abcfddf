"""The score stage: scorers give verdicts on stored turns, and the verdicts become scores.

`scoring` reads trajectories and writes scores. `scorers` chooses who judges: `math_verify`, `environment`, `code`, or a
user's function (`own`), all with the `interface` of scorers. `verifier` distributes answers to worker processes,
`worker` limits them, `grade` calls math-verify there.
"""
