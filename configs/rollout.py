"""The knobs of playing: sampling, groups and their selection, staleness, time limits, and the workers that play."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from configs.knobs import Knobs, NonNegativeInt, Share, Temperature

_HOST_AND_PORT = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"


class Sampling(Knobs):
    temperature: Temperature = 1.0
    """Sampling temperature, 0.01 to 2. 0 is greedy, which cannot be trained on."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; a value below 1 biases the logprobs."""
    top_k: NonNegativeInt = 0
    """Number of most probable tokens to sample from; 0 keeps all tokens, any other value biases the logprobs."""
    max_new_tokens: PositiveInt = 1024
    """Largest number of tokens in the completion of one turn."""


class Rollout(Knobs):
    problems_per_iteration: PositiveInt = 32
    """Number of problems drawn for an iteration, in an order that includes all problems before any repeats."""
    group_size: PositiveInt = 16
    """Number of episodes of each problem that are trained on."""
    generation_size: PositiveInt | None = None
    """Number of episodes of each problem that are played; the best `group_size` of them are trained on. Empty:
    `group_size`."""
    success_rate_lb: Share = 0.0
    """A group with a smaller share of right turns is rejected, and another problem is drawn in its place."""
    success_rate_ub: Share = 1.0
    """A group with a larger share of right turns is rejected, too. A bound says how hard problems may be; groups that
    teach nothing are those with equal returns."""
    reject_equal: bool = False
    """Reject groups whose episodes have equal returns, turn by turn, by the rewards that the environment gave: they
    teach nothing. Another problem is drawn in their place."""
    max_resampling_rounds: NonNegativeInt = 2
    """Number of rounds that replace rejected groups. If groups are still missing then, the batch is smaller, or even
    empty."""
    max_head_offpolicyness: NonNegativeInt = 0
    """Largest staleness that is trained on, in policy versions; older trajectories are left out. With `run.overlap`, it
    also bounds how far ahead episodes begin, so that none becomes too old."""
    concurrency: PositiveInt = 512
    """Number of episodes that run at the same time. Whole groups begin if `sampling.max_new_tokens` is 64 or less."""
    episode_deadline_s: PositiveFloat = 600
    """An episode that takes longer is stored as failed, by the policy's fault if the engine was answering most of the
    time. Time in which another episode blocked all others does not count. A completion that takes longer than half of
    it ends there, as at the token limit."""
    max_failed_share: Share = 0.1
    """A larger share of episodes that failed by the set-up's fault stops the run. Those that the policy's own behaviour
    ended (context, requests, time, calls that cannot be read) do not count; an alarm says when there are more."""
    rows_per_shard: PositiveInt = 256
    """Number of trajectories in one Parquet shard; a shard is written as soon as it is full."""
    allow_biased_sampling: bool = False
    """Train even if top_p or top_k bias the recorded logprobs, which are then those of the tokens that were left to
    sample from."""
    allow_own_sampling: bool = False
    """Let agents with queues ask with another temperature, top_p or top_k than `sampling`, although training takes the
    logprobs for those of `sampling`. Otherwise such a request fails its episode."""

    @property
    def longest_completion_s(self) -> float:
        """The time after which a completion is cut: early enough for its episode to be recorded with it."""
        return self.episode_deadline_s / 2


class Cluster(Knobs):
    """Processes beside the flow's own, which Ray runs on this host or on many. No knob here changes a number."""

    address: Annotated[str, Field(pattern=rf"^(local|auto|{_HOST_AND_PORT})$")] | None = None
    """Ray that runs the processes: `local` for one of this host alone, which the flow starts and ends, `auto` for the
    cluster that this host belongs to, or `host:port` of its head. Empty: one process, or `local` if more are needed.
    If it is set, or `workers_per_node` is 2 or more, episodes move into worker processes with vLLM servers of their
    own, unless `inference.urls` names some; the trainer stays in the flow's process, unless it must leave
    (`train.on_cluster`)."""
    workers_per_node: PositiveInt = 1
    """Rollout workers on each node, each with its own `inference.replicas` servers, or its share of `inference.urls`,
    and its own `rollout.concurrency` and `score.workers`. One is full at about 130,000 tokens/s, or 700 short
    episodes/s."""
    rollout_workers: PositiveInt | None = None
    """Largest number of rollout workers in all. Empty: as many as fit, also on nodes that join later. Nodes without one
    help to grade."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest wait for the first rollout worker, and for another one after all were lost."""
    silence_s: Annotated[float, Field(ge=5)] = 60.0
    """A worker that has not answered for so many seconds is lost: others play its episodes."""
