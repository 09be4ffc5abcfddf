"""PPO on stored trajectories.

`task` (Prefect) gives an order (`orders`) to `version_trainer`, which reads versions and writes the next policy. It
calls `trainer`, which runs one update:
1. `samples` builds training samples from trajectories and scores: `reward_shaping` computes the rewards of their turns,
   `credit` the returns, and `endings` what an episode without a verdict owes.
2. `prepare` makes the passes without gradient (`passes`, `logprobs`) and calls `advantages`.
3. `batches` cuts the samples into minibatches and micro-batches.
4. `step` takes one optimizer step for each minibatch, with `losses` and `kl`; `metrics` computes the update's metrics.
`train_state` holds policy, `critic`, `reference` and optimizer (`optimizer_state`) between updates. With a stream,
`trainer_process` gives the trainer a process of its own. `mean_kl` compares two policies for the gate; `recompute`
recomputes stored logprobs for audits.

With `ppo.parallel`, `ranks/` starts many processes with a `version_trainer` each. `mesh` is what they tell each other,
`sharding` divides models among them, `tensor_files` reads and writes their parts of a checkpoint. `memory` computes
what a rank needs.
"""
