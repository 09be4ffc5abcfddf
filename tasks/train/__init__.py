"""Training on stored trajectories.

A flow gives an order (`orders`) to `version_trainer`, which reads versions and writes the next policy. This runs in the
flow's process, or in several Ray actors (`tasks.cluster.trainer`) that carry out the same order together.
`version_trainer` calls `trainer`, which runs one update:
1. `samples` builds training samples from trajectories and scores; `returns` computes what their turns earn.
2. `prepare` makes the passes without gradient (`passes`); the algorithm (`algorithms`) decides what each token gets.
3. `batches` cuts the samples into minibatches and forward passes.
4. `step` takes one optimizer step (`optimizer`) for each minibatch, on the sum of `components`; `metrics` computes the
   update's metrics.
`train_state` holds policy and critic, reference and optimizer between updates. `policy` loads a policy, and recomputes
stored logprobs for audits.

`mesh` holds the messages between ranks. `sharding` divides models among them, and reads and writes each rank's
tensors of a checkpoint. `experts` is for mixtures of experts: it knows the names of their weights in files, and sends
tokens to the experts that the engine chose.

The folder has more than twelve files because each is a subject that is read alone: the steps of an update, and the
formulas that they use.
"""
