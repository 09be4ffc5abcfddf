"""The score stage: scorers give verdicts on stored turns, and the verdicts become scores.

`scoring` reads trajectories and writes scores. `scorers` chooses who judges: `math_verify`, `environment`, `code`, or a
user's function (`own`), all with the `interface` of scorers. `verifier` distributes answers to worker processes,
`worker` limits them. There `contract` grades, or `grade`, which calls math-verify alone (`score.reading=library`).

The contract has a module for each of its subjects, therefore so many files: `reading` finds the final answer and
`prose` the last number, formula or words in it; `golds` says what a solution is; `numbers` reads plain numbers,
`intervals` inequalities, after `plain_text` has written all in one way; `equality` asks math-verify.
"""
