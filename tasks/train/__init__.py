"""Training on stored trajectories.

`task` (Prefect) gives an order (`orders`) to `version_trainer`, which reads versions and writes the next policy. This
runs in the flow's process, or in several Ray actors (`tasks.cluster.trainer`) that carry out the same order together.
`version_trainer` calls `trainer`, which runs one update:
1. `samples` builds training samples from trajectories and scores; `returns` computes what their turns earn.
2. `prepare` makes the passes without gradient (`passes`); the algorithm (`algorithms`) decides what each token gets.
3. `batches` cuts the samples into minibatches and forward passes.
4. `step` takes one optimizer step for each minibatch, on the sum of `components`, with the formulas of `losses` and the
   learning rate of `schedules`; `metrics` computes the update's metrics.
`train_state` holds policy and critic (`policy`), reference and optimizer between updates. `recompute` recomputes stored
logprobs for audits.

`mesh` holds the messages between ranks. `sharding` divides models among them, and reads and writes each rank's
tensors of a checkpoint. `memory` computes what a rank needs. In mixtures of experts, `experts` knows the names of their
weights in files, and `routing` sends tokens to the experts that the engine chose.

The folder has more than twelve files because each is a subject that is read alone: the steps of an update, and the
formulas that they use.
"""
