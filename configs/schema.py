"""All sections of a configuration, and the rules that hold between them.

Each section lives in a file of its stage, with every knob documented where it is declared; `python -m configs` prints
them on one page. Every manifest stores the configuration, so that a data set or a checkpoint shows how it was made.
Unknown keys are refused.
"""

from collections.abc import Callable
from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from configs.agent import Agent, Environment
from configs.audit import Audit
from configs.cluster import Cluster, Trainer
from configs.evaluate import HELD_OUT, Evaluation, Retrain
from configs.inference import Inference
from configs.knobs import Knobs, Name, NonNegativeInt, Seed, refuse, refuse_idle
from configs.policy import Policy
from configs.problems import Problems
from configs.rollout import Rollout, Sampling
from configs.safety import check_plain, check_strings
from configs.score import Reward, Score
from configs.storage import Storage
from configs.train import PPO, Optimizer


class Run(Knobs):
    """The run: its name, its seed, its length."""

    name: Name
    """Name of the run. A flow run with the same name continues where the last one stopped."""
    seed: Seed = 1
    """Seed of the run. All other seeds derive from it, the iteration, the problem, the sample and the turn."""
    iterations: NonNegativeInt
    """Number of rounds of rollout, score and train. Raising it later continues the same run."""
    max_tokens: PositiveInt | None = None
    """End the run early after so many sampled tokens, with what is committed; empty: no limit."""
    max_minutes: PositiveFloat | None = None
    """End a flow run early after so many minutes. Raising `max_tokens` or this limit later continues the same run."""
    overlap: bool = False
    """Play a stream of episodes while others are trained on, up to `rollout.max_head_offpolicyness` (1 or more)
    iterations ahead; a data set holds the groups that finish first. The trainer has a process of its own."""
    when_held: Literal["stop", "wait"] = "stop"
    """Reaction while another flow run writes the same run: stop and name that flow run, or wait for its end."""


class Config(Knobs):
    """The resolved configuration of one run."""

    run: Run
    storage: Storage = Storage()
    problems: Problems
    policy: Policy
    agent: Agent = Agent()
    environment: Environment = Environment()
    sampling: Sampling = Sampling()
    rollout: Rollout = Rollout()
    inference: Inference = Inference()
    score: Score = Score()
    reward: Reward = Reward()
    ppo: PPO = PPO()
    trainer: Trainer = Trainer()
    cluster: Cluster = Cluster()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    retrain: Retrain = Retrain()
    audit: Audit = Audit()

    @model_validator(mode="after")
    def _by_rules(self) -> Self:
        values = self.model_dump()
        check_plain(values)
        check_strings(values)
        for rule in RULES:
            rule(self)
        return self

    @property
    def trains_apart(self) -> bool:
        """True if the trainer does not run in the flow's process."""
        return self.ppo.parallel.ranks > 1 or self.run.overlap or self.trainer.on_cluster

    @property
    def plays_apart(self) -> bool:
        """True if episodes are not played in the flow's process."""
        return self.cluster.workers_per_node > 1 or (self.cluster.address is not None and not self.inference.urls)

    @property
    def ray_address(self) -> str | None:
        """The Ray that the run needs (`Cluster.address`); None: one process is enough."""
        return self.cluster.address or ("local" if self.plays_apart or self.trains_apart else None)


def warm_start_has_problems(config: Config) -> None:
    """A warm start teaches arithmetic."""
    warm_start, kind = config.policy.warm_start, config.problems.train.kind
    refuse(
        warm_start is not None and not warm_start.teaches and kind != "arithmetic",
        f"policy.warm_start teaches arithmetic, but problems.train.kind={kind!r}: give policy.path, or "
        "policy.warm_start.teaches={kind: arithmetic}",
    )


def warm_start_shows_tools(config: Config) -> None:
    """A warm start shows calls of the tools that the agent offers, and of no others."""
    warm_start, tools = config.policy.warm_start, config.agent.tools
    if not warm_start:
        return
    refuse(
        warm_start.tool_share > 0 and not any(tool.type == "calculator" for tool in tools),
        f"policy.warm_start.tool_share={warm_start.tool_share:g} teaches calls of a tool that agent.tools does not "
        "offer: set agent.tools=[calculator], or tool_share to 0",
    )
    refuse(
        bool(tools) and not warm_start.tool_share,
        "agent.tools: the tiny model of policy.warm_start would not be shown them: set policy.warm_start."
        "tool_share=0.3 as the configuration demo-tools does, or give policy.path",
    )


def sampling_is_random(config: Config) -> None:
    """Greedy episodes teach nothing."""
    refuse(config.sampling.temperature == 0, "sampling.temperature=0 is greedy and cannot be trained on: use 1.0")


def sampling_is_unbiased(config: Config) -> None:
    """Recorded logprobs are those of the distribution that is trained."""
    sampling = config.sampling
    refuse(
        (sampling.top_p < 1 or sampling.top_k > 0) and not config.rollout.allow_biased_sampling,
        f"sampling.top_p={sampling.top_p}, sampling.top_k={sampling.top_k} bias the recorded logprobs: use 1.0 and 0, "
        "or set rollout.allow_biased_sampling=true",
    )


def completion_fits_context(config: Config) -> None:
    """A completion has room in the context of the servers."""
    tokens, context = config.sampling.max_new_tokens, config.inference.max_model_len
    refuse(tokens >= context, f"sampling.max_new_tokens={tokens} does not fit into inference.max_model_len={context}")


def minibatches_have_groups(config: Config) -> None:
    """Each minibatch holds whole groups."""
    minibatches, problems = config.ppo.ppo_n_minibatches, config.rollout.problems_per_iteration
    refuse(
        minibatches > problems,
        f"ppo.ppo_n_minibatches={minibatches} is more than rollout.problems_per_iteration={problems}: a minibatch "
        "holds whole groups",
    )


def groups_have_a_baseline(config: Config) -> None:
    """A group baseline compares two episodes or more."""
    refuse(
        config.ppo.advantage.type == "group" and config.rollout.group_size == 1,
        "rollout.group_size=1 leaves the group baseline nothing to compare: use 2 or more",
    )


def groups_can_be_filled(config: Config) -> None:
    """Enough episodes are played for a group."""
    rollout = config.rollout
    refuse(
        (rollout.generation_size or rollout.group_size) < rollout.group_size,
        f"rollout.generation_size={rollout.generation_size} is below rollout.group_size={rollout.group_size}: play at "
        "least as many episodes as are trained on",
    )


def groups_can_be_accepted(config: Config) -> None:
    """The bounds of the success rate leave some groups."""
    lowest, highest = config.rollout.success_rate_lb, config.rollout.success_rate_ub
    refuse(
        lowest > highest,
        f"rollout.success_rate_lb={lowest:g} is above success_rate_ub={highest:g}: every group would be rejected",
    )


def least_reward_has_scale(config: Config) -> None:
    """A least reward is given only where rewards are no verdicts."""
    if all(config.reward.shape_of(scorer) == "success" for scorer in config.score.by_source.values()):
        refuse_idle(config.reward, "least", why="where all scorers give verdicts: the least is a wrong answer's")


def overlong_fits_completion(config: Config) -> None:
    """The penalty for length begins above 0 tokens."""
    overlong, limit = config.reward.overlong_tokens, config.sampling.max_new_tokens
    refuse(overlong >= limit, f"reward.overlong_tokens={overlong} must be below sampling.max_new_tokens={limit}")


def servers_can_restart(config: Config) -> None:
    """Only servers that the pipeline started can be restarted."""
    refuse(
        bool(config.inference.urls) and config.inference.swap == "restart",
        "inference.swap=restart needs servers that the pipeline starts, but inference.urls is set: use reload",
    )


def copies_are_served(config: Config) -> None:
    """Copies for servers have the number format that the servers load."""
    storage, dtype = config.storage, config.inference.dtype
    refuse(
        storage.serving_copy and dtype != "bfloat16",
        f"storage.serving_copy adds weights in bfloat16, which inference.dtype={dtype} does not serve: set "
        "inference.dtype=bfloat16, or leave the copy out",
    )


def overlap_has_stale_data(config: Config) -> None:
    """A stream trains on what an older policy played."""
    refuse(
        config.run.overlap and config.rollout.max_head_offpolicyness < 1,
        "run.overlap trains on trajectories of an older policy: set rollout.max_head_offpolicyness=1 or more",
    )


def overlap_keeps_requests(config: Config) -> None:
    """A stream plays on while weights are swapped."""
    refuse(
        config.run.overlap and config.inference.swap == "restart",
        "run.overlap keeps requests during a swap of weights, but inference.swap=restart loses them: use reload",
    )


def stale_data_is_weighted(config: Config) -> None:
    """Data of an older policy are corrected for it."""
    oldest = config.rollout.max_head_offpolicyness
    refuse(
        oldest > 0 and config.ppo.objective == "recomputed",
        f"ppo.objective=recomputed is right on-policy only, but rollout.max_head_offpolicyness={oldest}: use decoupled",
    )


def ranks_have_work(config: Config) -> None:
    """Each rank has an episode of every minibatch."""
    parallel, rollout = config.ppo.parallel, config.rollout
    episodes = rollout.problems_per_iteration * rollout.group_size // config.ppo.ppo_n_minibatches
    refuse(
        parallel.ranks > episodes,
        f"ppo.parallel={{replicate: {parallel.replicate}, shard: {parallel.shard}}} has {parallel.ranks} ranks, but a "
        f"minibatch has only {episodes} episodes: use fewer ranks, lower ppo.ppo_n_minibatches, or raise "
        "rollout.problems_per_iteration",
    )


def cluster_is_possible(config: Config) -> None:
    """Processes beside the flow's reach the store, and each worker among them has servers of its own."""
    cluster, urls = config.cluster, config.inference.urls
    if config.ray_address is None:
        refuse_idle(cluster, *(name for name in Cluster.model_fields if name != "address"), why="in one process")
    refuse(
        config.trainer.on_cluster and cluster.address is None,
        "trainer.on_cluster needs a cluster: set cluster.address=auto or so",
    )
    many_hosts, alone = cluster.address not in (None, "local"), cluster.workers_per_node == 1
    refuse(
        bool(urls) and cluster.address is not None and (not config.trains_apart if alone else many_hosts),
        f"cluster.address={cluster.address} starts workers with servers of their own, but inference.urls names others: "
        "leave one of the two out, or share them among cluster.workers_per_node workers of this host",
    )
    refuse(
        0 < len(urls) < cluster.workers_per_node,
        f"cluster.workers_per_node={cluster.workers_per_node}, but inference.urls names only {len(urls)} server(s), "
        "and each worker needs its own: lower it, or name more",
    )
    refuse(
        config.ray_address is not None and config.storage.root.startswith("memory://"),
        "storage.root=memory://… is in this process only: several processes need a folder or s3://bucket/prefix",
    )


def gate_has_sampled_episodes(config: Config) -> None:
    """A gate that compares sampled episodes needs some."""
    refuse(
        config.retrain.gate.episodes == "sampled" and not config.evaluation.samples,
        "retrain.gate.episodes=sampled needs sampled episodes: set evaluation.samples=8 or so",
    )


def gate_names_known_sets(config: Config) -> None:
    """The gate compares on sets that are evaluated."""
    sets, gate = [HELD_OUT, *config.evaluation.sets], config.retrain.gate
    for knob, names in (("target", [gate.target]), ("guarded", gate.guarded or [])):
        for name in names:
            refuse(
                name not in sets,
                f"retrain.gate.{knob}={name!r} is not an evaluation set; use one of {', '.join(sets)}",
            )


RULES: list[Callable[[Config], None]] = [
    warm_start_has_problems,
    warm_start_shows_tools,
    sampling_is_random,
    sampling_is_unbiased,
    completion_fits_context,
    minibatches_have_groups,
    groups_have_a_baseline,
    groups_can_be_filled,
    groups_can_be_accepted,
    least_reward_has_scale,
    overlong_fits_completion,
    servers_can_restart,
    copies_are_served,
    overlap_has_stale_data,
    overlap_keeps_requests,
    stale_data_is_weighted,
    ranks_have_work,
    cluster_is_possible,
    gate_has_sampled_episodes,
    gate_names_known_sets,
]
"""The rules that hold between sections. Each raises the sentence that names the knobs and the remedy."""
