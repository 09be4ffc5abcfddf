"""PPO on stored trajectories: samples, advantages, batches, logprobs, loss and the trainer."""
