"""The score stage: scorers give verdicts on stored turns, and the verdicts become scores.

`scoring` reads trajectories and writes scores. `scorers` chooses who gives them: math-verify, the environment, a user's
function, or `code`, all with the interface in `verdict`. `verifier` distributes answers to worker processes, `worker`
limits them and calls users' functions there. `contract` grades there, with `library`, in which math-verify compares
expressions.

The contract has a module for each of its subjects, therefore so many files: `reading` finds the final answer and the
last number, formula or words in it; `golds` says what a solution is; `numbers` reads plain numbers, after `plain_text`
has written all in one way, and knows the words beside them, from the table `languages.toml`.
"""
