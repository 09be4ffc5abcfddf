"""PPO on stored trajectories.

`task` (Prefect) calls `trainer`, which runs one update:
1. `samples` builds training samples from trajectories and scores; `reward_shaping` computes their rewards and returns.
2. `prepare` makes the passes without gradient (`passes`, `logprobs`) and calls `advantages`.
3. `batches` cuts the samples into minibatches and micro-batches.
4. `step` takes one optimizer step for each minibatch, with `losses` and `kl`; `metrics` computes the update's metrics.
`train_state` holds policy, `critic`, `reference` and optimizer (`optimizer_state`) between updates. With a stream,
`trainer_process` gives the trainer a process of its own. `mean_kl` compares two policies for the gate; `recompute`
recomputes stored logprobs for audits.
"""
