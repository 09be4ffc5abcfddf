"""All sections of a configuration, and the rules that hold between them.

Each section lives in a file of its stage, with every knob documented where it is declared; `python -m configs` prints
them on one page. Every manifest stores the configuration, so that a data set or a checkpoint shows how it was made.
Unknown keys are refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.agent import Agent, Environment
from configs.algorithms import PPO, AnyAlgorithm
from configs.audit import Audit
from configs.evaluate import HELD_OUT, Evaluation, Retrain
from configs.inference import RETURN_EXPERTS, Inference
from configs.knobs import Knobs, Name, NonNegativeInt, Seed, refuse_idle
from configs.models import Models
from configs.policy import Policy
from configs.problems import Problems, scorers_named
from configs.rollout import Cluster, Rollout, Sampling
from configs.safety import check_plain
from configs.score import BY_MODEL, Reward, Score
from configs.storage import Storage
from configs.train import Fit, Optimizer, Train


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
    accept_code: bool = False
    """Continue the run although agents, environments, tools or scorers of your own have changed since it was last
    played (`tasks/registry.py` says what counts). Data sets and checkpoints name the files."""
    when_held: Literal["stop", "wait"] = "stop"
    """Reaction while another flow run writes the same run: stop and name that flow run, or wait for its end."""


class Monitoring(Knobs):
    """Numbers that a running flow shows; OpenTelemetry's standard variables export spans. No knob changes a result."""

    prometheus: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of 127.0.0.1 at which the flow serves its metrics for Prometheus, such as 9464; empty: none are served.
    Every user of this host can read them: they hold counts, times and names of runs, but no texts and no secrets. vLLM
    servers that the pipeline starts then count what they do, too."""


class Config(Knobs):
    """The resolved configuration of one run."""

    release: Literal[1] = 1
    """Number of the behaviour that nobody chooses, for readers of stored configurations; programs write it."""
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
    algorithm: AnyAlgorithm = PPO()
    """The algorithm: `algorithm.type` names it, and the other knobs are those that it has."""
    models: Models = Models()
    train: Train = Train()
    fit: Fit = Fit()
    cluster: Cluster = Cluster()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    retrain: Retrain = Retrain()
    audit: Audit = Audit()
    tracking: list[str] = []
    """Trackers that get what the run commits: `tensorboard`, `wandb`, `mlflow`, `trackio` or `package.module:Class`."""
    monitoring: Monitoring = Monitoring()

    @model_validator(mode="before")
    @classmethod
    def _scorers_of_members(cls, values: Any) -> Any:
        """Enter the scorers that members of a mixture name into `score.type`: all that reads it then knows them."""
        match values:
            case {"problems": {"train": [*members]}} if isinstance(section := values.get("score", {}), dict):
                named = scorers_named(members)
                given = section.get("type", Score.model_fields["type"].default)
                by_source = given if isinstance(given, dict) else {"default": given}
                for name in named:
                    if by_source.get(name, named[name]) != named[name]:
                        both = f"score.type.{name}={by_source[name]!r}, but its member of problems.train names"
                        raise ValueError(f"{both} {named[name]!r}: leave one of the two out")
                return {**values, "score": {**section, "type": by_source | named}} if named else values
        return values

    @model_validator(mode="after")
    def _by_rules(self) -> Self:
        check_plain(self.model_dump())
        for rule in RULES:
            for sentence in rule(self):
                raise ValueError(sentence)
        return self

    def of_source(self, source: str) -> "Config":
        """Return the configuration for the problems of a source: that of its member, if it is one's of a mixture."""
        member = next((each for each in self.problems.members if each.name == source), None)
        if member is None:
            return self
        own = {"agent": member.agent, "environment": member.environment}
        filtered = {"rollout": self.rollout.model_copy(update=member.filters)}
        return self.model_copy(update=filtered | {name: section for name, section in own.items() if section})

    @property
    def played(self) -> "list[tuple[str, Config]]":
        """The configuration for each member, after what messages begin with; the run's alone if it has no mixture."""
        return [(part.where, self.of_source(part.name)) for part in self.problems.trained]

    @property
    def trains_apart(self) -> bool:
        """True if the trainer does not run in the flow's process."""
        return self.train.parallel.ranks > 1 or self.run.overlap or self.train.on_cluster

    @property
    def plays_apart(self) -> bool:
        """True if episodes are not played in the flow's process."""
        return self.cluster.workers_per_node > 1 or (self.cluster.address is not None and not self.inference.urls)

    @property
    def servers(self) -> Inference:
        """`inference` for the servers. vLLM counts what it does, at some cost, only if its metrics are served."""
        quiet = [] if self.monitoring.prometheus else ["--disable-log-stats"]
        routed = [RETURN_EXPERTS] if self.train.routing_replay else []
        return self.inference.model_copy(update={"extra_args": [*self.inference.extra_args, *quiet, *routed]})

    @property
    def ray_address(self) -> str | None:
        """The Ray that the run needs (`Cluster.address`); None: one process is enough."""
        return self.cluster.address or ("local" if self.plays_apart or self.trains_apart else None)


Refusals = Iterator[str]
"""A sentence for each thing that is wrong, which names the knobs and the remedy."""


def fork(config: Config) -> Refusals:
    """A fork has another name than the run that it begins from."""
    if (config.policy.fork or "").rpartition("@")[0] == config.run.name:
        yield f"policy.fork={config.policy.fork} begins another run, which needs a name of its own: set run.name=…"


def lora(config: Config) -> Refusals:
    """The reference policy is the one without adapter: a moving average would be a second model."""
    if config.policy.lora and config.algorithm.kl.kl_ctl and config.algorithm.kl.reference == "ema":
        ema = "algorithm.kl.reference=ema does not work with policy.lora"
        yield f"{ema}, whose reference policy has no adapter: use fixed"


def sampling(config: Config) -> Refusals:
    """Sampling is random, its logprobs are those of the distribution that is trained, and completions have room."""
    knobs, context = config.sampling, config.inference.max_model_len
    if knobs.temperature == 0:
        yield "sampling.temperature=0 is greedy and cannot be trained on: use 1.0"
    if (knobs.top_p < 1 or knobs.top_k > 0) and not config.rollout.allow_biased_sampling:
        biased = f"sampling.top_p={knobs.top_p}, sampling.top_k={knobs.top_k} bias the recorded logprobs"
        yield f"{biased}: use 1.0 and 0, or set rollout.allow_biased_sampling=true"
    if knobs.max_new_tokens >= context:
        yield f"sampling.max_new_tokens={knobs.max_new_tokens} does not fit into inference.max_model_len={context}"


def groups(config: Config) -> Refusals:
    """Groups can be filled and accepted, and every rank has an episode of each minibatch of whole groups."""
    rollout, train = config.rollout, config.train
    if train.minibatches > rollout.problems_per_iteration:
        most = f"rollout.problems_per_iteration={rollout.problems_per_iteration}"
        yield f"train.minibatches={train.minibatches} is more than {most}: a minibatch holds whole groups"
    if (rollout.generation_size or rollout.group_size) < rollout.group_size:
        least = f"rollout.group_size={rollout.group_size}: play at least as many episodes as are trained on"
        yield f"rollout.generation_size={rollout.generation_size} is below {least}"
    for where, each in config.played:
        low, high = each.rollout.success_rate_lb, each.rollout.success_rate_ub
        if low > high:
            bounds = f"rollout.success_rate_lb={low:g} is above success_rate_ub={high:g}"
            yield f"{where}{bounds}: every group would be rejected"
    episodes = rollout.problems_per_iteration * rollout.group_size // train.minibatches
    if train.parallel.ranks > episodes:
        few = f"train.parallel has {train.parallel.ranks} ranks, but a minibatch has only {episodes} episodes"
        yield f"{few}: use fewer ranks, lower train.minibatches, or raise rollout.problems_per_iteration"


def algorithms(config: Config) -> Refusals:
    """An algorithm needs knobs of other sections, such as a teacher."""
    played = [(where, each.agent, each.rollout) for where, each in config.played]
    yield from config.algorithm.refusals(config.rollout, config.models, played)


def models(config: Config) -> Refusals:
    """Each model beside the policy has its use, and servers that the flow can start; a teacher reads whole episodes."""
    asked, served = config.score.models, config.models.served()
    for role, scorer in asked.items():
        named = ", or its name and urls" if role == "judge" else ""
        if role not in served:
            yield f"score.type={scorer} asks a model: give models.{role}.path{named}"
    for role, knobs in served.items():
        if role != "teacher" and role not in asked:
            scorer = next(name for name, of in BY_MODEL.items() if of == role)
            yield f"models.{role} has no use: set score.type={scorer}, for all sources or some, or leave it out"
        if config.plays_apart and not knobs.urls:
            yield (
                f"models.{role}: workers in other processes (cluster.*) have this host's devices, so the flow starts "
                f"no servers beside them: start some and give models.{role}.urls"
            )
    if teacher := served.get("teacher"):
        length = config.inference.max_model_len
        if teacher.max_model_len <= length:
            yield f"models.teacher.max_model_len={teacher.max_model_len} must be above inference.max_model_len={length}"
        if config.sampling.temperature != 1:
            warm = f"sampling.temperature={config.sampling.temperature:g}"
            yield f"{warm}, but vLLM tells a teacher's probabilities at 1: use 1, or models.teacher.checkpoint"


def rewards(config: Config) -> Refusals:
    """A least reward is given only where rewards are no verdicts; the penalty for length begins above 0 tokens."""
    reward, limit = config.reward, config.sampling.max_new_tokens
    verdicts = all(reward.shape_of(scorer) == "success" for scorer in config.score.by_source.values())
    if verdicts and reward.least is not None:
        yield f"reward.least={reward.least} has no effect where all scorers give verdicts: it is a wrong answer's"
    if reward.overlong_tokens >= limit:
        yield f"reward.overlong_tokens={reward.overlong_tokens} must be below sampling.max_new_tokens={limit}"


def stale_data(config: Config) -> Refusals:
    """A stream trains on what an older policy played, and plays on while weights are swapped."""
    oldest = config.rollout.max_head_offpolicyness
    if config.run.overlap and oldest < 1:
        yield "run.overlap trains on trajectories of an older policy: set rollout.max_head_offpolicyness=1 or more"


def processes(config: Config) -> Refusals:
    """Processes beside the flow's reach the store, and each worker among them has servers of its own."""
    cluster, urls = config.cluster, config.inference.urls
    if config.ray_address is None:
        refuse_idle(cluster, *(name for name in Cluster.model_fields if name != "address"), why="in one process")
    if config.train.on_cluster and cluster.address is None:
        yield "train.on_cluster needs a cluster: set cluster.address=auto or so"
    many_hosts, alone = cluster.address not in (None, "local"), cluster.workers_per_node == 1
    if bool(urls) and cluster.address is not None and (not config.trains_apart if alone else many_hosts):
        yield (
            f"cluster.address={cluster.address} starts workers with servers of their own, but inference.urls names "
            "others: leave one of the two out, or share them among cluster.workers_per_node workers of this host"
        )
    if 0 < len(urls) < cluster.workers_per_node:
        few = f"inference.urls names only {len(urls)} server(s), and each worker needs its own: lower it, or name more"
        yield f"cluster.workers_per_node={cluster.workers_per_node}, but {few}"


def gate(config: Config) -> Refusals:
    """The gate compares episodes that are played, on sets that are evaluated."""
    knobs, sets = config.retrain.gate, [HELD_OUT, *config.evaluation.sets]
    if knobs.episodes == "sampled" and not config.evaluation.samples:
        yield "retrain.gate.episodes=sampled needs sampled episodes: set evaluation.samples=8 or so"
    for name in [knobs.target, *(knobs.guarded or [])]:
        if name not in sets:
            yield f"retrain.gate: {name!r} is not an evaluation set; use one of {', '.join(sets)}"


RULES = (fork, lora, sampling, groups, algorithms, models, rewards, stale_data, processes, gate)
"""The rules that hold between sections, by subject."""
