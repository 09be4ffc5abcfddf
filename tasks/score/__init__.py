"""The score stage: the verifier grades stored answers in worker processes, and the verdicts become scores.

`scoring` reads trajectories and writes scores, `verifier` distributes answers to workers, `worker` limits them, `grade`
calls math-verify.
"""
