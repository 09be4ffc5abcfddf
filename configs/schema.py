"""All knobs of the pipeline on one page, each documented where it is declared.

`configs.loader` reads a configuration from YAML, merges it with dotted overrides and validates it into a frozen
`Config`. Every manifest stores the configuration, so that a data set or a checkpoint shows how it was made. Unknown
keys are refused.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, PositiveFloat, PositiveInt, model_validator

from configs.audit import Audit
from configs.knobs import (
    MOST_WORKERS,
    Knobs,
    Megabytes,
    NonNegativeFloat,
    NonNegativeInt,
    Seed,
    Share,
    Temperature,
    Workers,
    refuse_idle,
)
from configs.plain import brief, check_plain
from configs.safety import check_extra_args, check_place, check_server, check_strings, check_uri

Decay = Annotated[float, Field(ge=0, lt=1)]
Column = Literal["id", "prompt", "solutions", "source", "metadata"]
Fields = dict[Column, str | list[str]]
KLEstimator = Literal["k1", "k2", "k3"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


URI = Annotated[str, AfterValidator(check_uri)]
LONGEST_LEASE_S = 9e9
"""The longest time that a thread can wait, in seconds."""
LONGEST_VERDICT_S = 9e8
"""A tenth of the longest time that a thread can wait, because the pipeline waits ten times as long for a verifier."""
MOST_PAIRS = 10**8
"""Largest number of pairs of operands; all pairs are listed before some are drawn."""


def _exclusions_version(version: str) -> str:
    if not re.fullmatch(r"exclusions/[0-9a-f]+", version):
        raise ValueError(
            f"{version!r} is not a version such as exclusions/1f0c4a7be23d5566: `python -m tasks.provenance exclude` "
            "prints them, `python -m storage ls --kind exclusions` lists them; an alias may move, so it is not allowed"
        )
    return version


_OTHER_PARALLEL = re.compile(r"tensor|context|sequence|pipeline|^[tcsp]p(_size)?$", re.IGNORECASE)
"""Names of kinds of parallelism that do not exist here, as other programs write them."""

_HOST_AND_PORT = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"

HELD_OUT = "held-out"
"""The name of `problems.held_out` among the evaluation sets."""


class Run(Knobs):
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
    lease_s: Annotated[float, Field(gt=0, le=LONGEST_LEASE_S)] = 60.0
    """A flow run on another machine counts as dead after so many seconds without a sign of life."""


class Storage(Knobs):
    root: Annotated[URI, AfterValidator(check_place)] = "./var"
    """The root of the store that holds all versions: a local folder, `memory://name` or `s3://bucket/prefix`."""
    cache: Annotated[str, AfterValidator(check_place)] = "./var/cache"
    """Local folder for copies of the versions of a remote root, and for logs of servers."""
    cache_gib: PositiveFloat = 100.0
    """Largest size of the copies of a remote root; the files that were unused for longest are deleted first."""
    request_timeout_s: PositiveFloat = 30.0
    """S3: a request without an answer for so many seconds is sent again."""
    patience_s: PositiveFloat = 600.0
    """S3: an operation is retried for so many seconds before the run fails."""
    serving_copy: bool = False
    """Add to every checkpoint a bfloat16 copy of its weights: servers with `inference.dtype=bfloat16` fetch half."""
    whole_copy_every: PositiveInt = 1
    """Store only every so many-th copy whole, and of the others what changed: a few per cent, which is all that hosts
    with the copy before it fetch. For remote roots, with `serving_copy`."""


class ArithmeticSource(Knobs):
    """Generated problems such as `a + b` and `a - b`. The split of a problem depends only on its text."""

    kind: Literal["arithmetic"]
    split: Literal["train", "held-out"] = "train"
    """Split to generate. Train and held-out never share a problem, whatever the seeds and ranges."""
    low: int = 0
    """Smallest operand."""
    high: int = 20
    """Largest operand."""
    operators: Annotated[list[Literal["+", "-", "*"]], Field(min_length=1)] = ["+", "-"]
    """Operators to draw from."""
    count: PositiveInt | None = None
    """Number of problems to take after shuffling; empty: all."""
    seed: int = 0
    """Seed of the shuffle."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high={self.high} is below low={self.low}: set high to {self.low} or more")
        if (pairs := len(set(self.operators)) * (self.high - self.low + 1) ** 2) > MOST_PAIRS:
            raise ValueError(f"{brief(pairs)} possible problems are more than {MOST_PAIRS:,}: lower high")
        return self


class FileSource(Knobs):
    """Rows of a JSONL or Parquet file."""

    kind: Literal["jsonl", "parquet"]
    path: URI
    """Path or URI of the file, or a pattern for several (`new/*.jsonl`); ids then begin with the name of the file."""
    preset: Literal["gsm8k", "math", "areal", "verifiers", "verl"] | None = None
    """Name of a known data set, whose field mapping is used; or give `fields`."""
    fields: Fields = {}
    """Your own mapping: the columns of the prompt and the solution(s) and, if you like, of the id and the source. The
    problem keeps those of `metadata`, a list, which agent, environment and scorer see. `reward_model.ground_truth` is a
    column inside of another. A prompt may be messages; a row may lack columns of `metadata`."""
    count: PositiveInt | None = None
    """Take only so many rows, the first ones; empty: all."""
    max_line_mb: Megabytes = 16
    """A longer line, or row of a Parquet file, is a bad row. Without this limit a file without line ends would fill the
    memory."""

    @model_validator(mode="after")
    def _mapping(self) -> Self:
        _check_mapping(self.preset, self.fields)
        return self


class HubSource(Knobs):
    """A Hugging Face data set by name."""

    kind: Literal["hub"]
    name: str
    """Name of the data set, such as `openai/gsm8k`, or a local folder with a data set."""
    subset: str | None = None
    """Configuration of the data set (Hugging Face's term), such as `main`."""
    split: str = "train"
    """Split of the data set."""
    preset: Literal["gsm8k", "math", "areal", "verifiers", "verl"] | None = None
    """Name of a known data set, whose field mapping is used; or give `fields`."""
    fields: Fields = {}
    """Your own mapping: the columns of the prompt and the solution(s) and, if you like, of the id and the source. The
    problem keeps those of `metadata`, a list, which agent, environment and scorer see. `reward_model.ground_truth` is a
    column inside of another. A prompt may be messages; a row may lack columns of `metadata`."""
    count: PositiveInt | None = None
    """Take only so many rows, the first ones; empty: all."""

    @model_validator(mode="after")
    def _mapping(self) -> Self:
        _check_mapping(self.preset, self.fields)
        return self


class StoredSource(Knobs):
    """A problem set that is already in the store."""

    kind: Literal["stored"]
    version: Annotated[str, Field(pattern=r"^problems/[0-9a-f]+$")]
    """Version of the problem set, such as `problems/1f0c4a7be23d5566`."""


def _check_mapping(preset: str | None, fields: Fields) -> None:
    if bool(preset) == bool(fields):
        raise ValueError(
            "give either preset (gsm8k, math, areal, verifiers, verl) or fields (prompt and solutions), not both"
        )
    if fields and not {"prompt", "solutions"} <= fields.keys():
        raise ValueError(f"fields={fields} must name the columns of prompt and of solutions")
    if several := [name for name, columns in fields.items() if isinstance(columns, list) and name != "metadata"]:
        raise ValueError(f"fields.{several[0]}={fields[several[0]]}: only metadata has a list of columns; name one")


Source = Annotated[ArithmeticSource | FileSource | HubSource | StoredSource, Field(discriminator="kind")]


class ProblemSampling(Knobs):
    """The frequency with which a run draws each problem, by its results in earlier runs (`python -m flows.history`)."""

    prefer: Literal["all", "middle"] = "all"
    """`all` draws every problem once before any repeats; `middle` draws problems more often that are neither always nor
    never solved."""
    retire_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out problems whose success rate is at least this; 0.95 is usual; empty: leave out none for this reason."""
    leave_out_suspects: bool = False
    """Leave out problems that were never solved, because their gold answers may be wrong."""
    least_episodes: PositiveInt = 16
    """A problem with fewer episodes has no known success rate yet; it is drawn like a problem of the middle."""
    last_episodes: PositiveInt = 64
    """The success rate of a problem counts about so many of its newest episodes."""

    @property
    def active(self) -> bool:
        return self.prefer != "all" or self.retire_at is not None or self.leave_out_suspects

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.last_episodes < self.least_episodes:
            raise ValueError(
                f"last_episodes={self.last_episodes} is below least_episodes={self.least_episodes}: "
                "no problem would ever have enough episodes; raise last_episodes"
            )
        return self


class Problems(Knobs):
    train: Source
    """Problems that the policy is trained on."""
    held_out: Source
    """Problems that the policy is evaluated on."""
    sampling: ProblemSampling = ProblemSampling()
    """Knobs of how often each problem of `train` is drawn."""
    exclusions: list[Annotated[str, AfterValidator(_exclusions_version)]] = []
    """Versions (`exclusions/…`) of exclusions, made by `python -m tasks.provenance exclude`. Their trajectories enter
    no update, and their problems are not drawn. The list may change during a run. It does not affect the warm start."""
    max_bad_share: Share = 0.01
    """Bad rows are dropped and reported; a larger share of bad rows is an error."""
    without_room: Literal["leave-out", "refuse", "play"] = "leave-out"
    """Reaction to problems whose first prompt leaves less of `inference.max_model_len` than a sixteenth of
    `sampling.max_new_tokens`: name and never play them, stop before anything is played, or play them all the same."""


class WarmStart(Knobs):
    """A tiny Qwen3 and its tokenizer, trained from scratch on generated arithmetic problems."""

    teaches: ArithmeticSource | None = None
    """Problems that the warm start teaches; empty: `problems.train`, which must then be arithmetic."""
    hidden_size: Annotated[int, Field(gt=0, le=2**16)] = 128
    """Width of the model: an even multiple of `heads`."""
    layers: Annotated[int, Field(gt=0, le=1000)] = 3
    """Number of layers."""
    heads: PositiveInt = 4
    """Number of attention heads."""
    kv_heads: PositiveInt = 2
    """Number of key-value heads; `heads` must be a multiple of it."""
    steps: PositiveInt = 1000
    """Largest number of supervised steps."""
    target_accuracy: Share = 0.45
    """Stop when the mean probability of a complete right answer on the taught problems reaches this."""
    batch_size: PositiveInt = 64
    """Number of examples in a step."""
    lr: PositiveFloat = 1e-3
    """Learning rate after a short warm-up."""
    two_turn_share: Share = 0.25
    """Share of the examples in which a second turn corrects a wrong first answer, which is masked out of the loss."""
    tool_share: Share = 0.0
    """Share of the examples in which the answer comes from a call of the calculator, whatever the problem: the policy
    learns how a call looks, but not when it pays."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.two_turn_share + self.tool_share > 1:
            raise ValueError(
                f"two_turn_share={self.two_turn_share:g} and tool_share={self.tool_share:g} are more than 1 together: "
                "lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        size = self.hidden_size
        if size % (2 * self.heads):
            fitting = ", ".join(str(heads) for heads in range(1, min(size, 100)) if size % (2 * heads) == 0)
            remedy = f"set heads to {fitting}" if fitting else "set hidden_size to an even number"
            raise ValueError(f"hidden_size={size} is not heads={self.heads} times an even number: {remedy}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: use a divisor of it")
        return self


class Policy(Knobs):
    path: URI | None = None
    """A transformers folder, the URI of a committed checkpoint, or a hub name. Weights must be safetensors and not
    quantised. A policy that cannot be trained or played is refused; until policy version 0 is committed, the run can
    continue with another path."""
    warm_start: WarmStart | None = None
    """Make and train a tiny policy instead of loading one."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.warm_start is None):
            raise ValueError("give exactly one of policy.path and policy.warm_start")
        return self


class ToolChoice(Knobs):
    """A tool; its type alone is enough: `agent.tools=[python]`."""

    type: str
    """`python`, `calculator`, or `package.module:name` for your own class or `async def`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the tool's constructor; they are checked before anything starts."""

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, values: Any) -> Any:
        return {"type": values} if isinstance(values, str) else values


class Agent(Knobs):
    type: str = "math-multi-turn"
    """Registered name, or `package.module:Class` for your own class."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; they are checked before anything starts."""
    tools: list[ToolChoice] = []
    """Tools that the policy may call, for agents that offer them, such as `[python, calculator]` or
    `[{type: python, args: {stateful: true}}]`."""


class Environment(Knobs):
    type: str = "math-verify"
    """Registered name, or `package.module:Class` for your own class."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; they are checked before anything starts."""


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
    policy_lag: NonNegativeInt = 0
    """Play with the policy so many versions behind the newest: intended staleness, for experiments."""
    concurrency: PositiveInt = 512
    """Number of episodes that run at the same time. Whole groups begin if `sampling.max_new_tokens` is 64 or less."""
    processes: PositiveInt = 1
    """Number of processes of this host that play, each with its share of the servers (`inference.replicas` or
    `inference.urls`), of `concurrency` and of `score.workers`. 1: the flow's own process. It is full at about 110,000
    tokens/s, or 370 short episodes/s."""
    episode_deadline_s: PositiveFloat = 600
    """An episode that takes longer is stored as failed, by the policy's fault if the engine was answering most of the
    time. Time in which another episode blocked all others does not count."""
    request_timeout_s: PositiveFloat = 300
    """A completion that takes longer, or half of `episode_deadline_s`, ends there, as at the token limit. A request of
    which nothing was sampled in this time is sent again."""
    request_retries: NonNegativeInt = 5
    """Number of times that a failed request is sent again."""
    max_failed_share: Share = 0.1
    """A larger share of episodes that failed by the set-up's fault stops the run. Those that the policy's own behaviour
    ended (context, requests, time, calls that cannot be read) do not count; an alarm says when there are more."""
    rows_per_shard: PositiveInt = 256
    """Number of trajectories in one Parquet shard; a shard is written as soon as it is full."""
    allow_biased_sampling: bool = False
    """Train even if top_p or top_k bias the recorded logprobs."""
    allow_own_sampling: bool = False
    """Let agents with queues ask with another temperature, top_p or top_k than `sampling`, although training takes the
    logprobs for those of `sampling`. Otherwise such a request fails its episode."""

    @property
    def longest_completion_s(self) -> float:
        """The time after which a completion is cut: early enough for its episode to be recorded with it."""
        return min(self.request_timeout_s, self.episode_deadline_s / 2)


class Inference(Knobs):
    urls: list[Annotated[URI, AfterValidator(check_server)]] = []
    """vLLM servers to use, such as http://127.0.0.1:8000 or unix:///run/vllm; empty: the pipeline starts `replicas`.
    Such servers need --enable-scale-out, VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and access to the
    checkpoint files. Their API key is read from the environment (VLLM_API_KEY). A command does not know what they
    serve, so its first swap sets their weights to 0: the canary then proves that other weights were loaded."""
    replicas: PositiveInt = 1
    """Number of servers to start if no URLs are given. Each gets its own GPUs out of CUDA_VISIBLE_DEVICES, or out of
    all GPUs if that is not set: as many as the parallel sizes in `extra_args` need. Too few GPUs are an error. Servers
    take the last GPUs and the trainer takes the first one, which it shares with a server only if no GPU is free."""
    swap: Literal["reload", "restart"] = "reload"
    """Method by which servers get new weights: in place, or by a restart (for tied embeddings on a CPU)."""
    canary_tolerance: PositiveFloat = 1e-4
    """Largest mean difference between the server's and the trainer's logprobs of the canary; it allows for errors of
    the number format. A swap must also show that the weights changed: by these logprobs, or by the server's
    checksums."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the served weights."""
    max_model_len: PositiveInt = 2048
    """Length of the context in tokens: prompt, turns and feedback together."""
    gpu_memory_utilization: Share = 0.9
    """Share of the GPU's memory that a server takes (GPU only)."""
    kv_cache_gib: PositiveInt = 1
    """Memory for the key-value cache in GiB (CPU only)."""
    threads: PositiveInt = 1
    """Number of OpenMP threads of a server (CPU only)."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs: servers start sooner, but run slower on GPUs."""
    startup_timeout_s: PositiveFloat = 600
    """A server that is not healthy after so many seconds is an error."""
    extra_args: Annotated[list[str], AfterValidator(check_extra_args)] = []
    """More command line arguments for vLLM, such as [--max-num-seqs, "512"]. Arguments that change where it listens or
    what it serves, or that run other code, are refused."""

    @model_validator(mode="after")
    def _startable(self) -> Self:
        if self.urls:  # these knobs have no effect on servers that the pipeline does not start
            return self
        if self.gpu_memory_utilization == 0:
            raise ValueError("gpu_memory_utilization=0 leaves no memory to the server: use 0.9 or so")
        for name in ("replicas", "threads"):
            if getattr(self, name) > MOST_WORKERS:
                raise ValueError(f"{name} is above {MOST_WORKERS:,}: no machine starts more; use a smaller number")
        return self


class Score(Knobs):
    type: str | dict[str, str] = "math-verify"
    """Scorer that judges stored turns: a registered name (`math-verify`, `environment`, `code`), or
    `package.module:function` for your own. Or a mapping from the source of problems to such names:
    `{default: math-verify, code: code}`."""
    args: dict[str, dict[str, Any]] = {}
    """Keyword arguments by scorer, such as `{environment: {success_above: 0.5}}`; they are checked before anything
    starts."""
    reading: Literal["answer", "library"] = "answer"
    """The text that scorer and environment `math-verify` grade. answer: the final answer that the agent gave to the
    environment, read as a person would read it (`tasks/score/README.md`). library: whatever math-verify finds in the
    turn's text, as before; it pays for the question's own expression, such as `12 + 7` for 19."""
    success: Literal["said", "reward"] = "said"
    """When a turn is right for the scorer `environment` and for filters while playing. said: environment or agent said
    so with a verdict; else, if its reward has a part named `correct`, that is above 0.5; else its reward is above
    `success_above` of the scorer `environment` (0). reward: the part counts for nothing, so a paid format may too."""
    workers: Workers = 2
    """Number of verifier processes, which can be killed."""
    timeout_s: Annotated[float, Field(ge=1e-6, le=LONGEST_VERDICT_S)] = 5
    """An answer that needs more seconds of processor time counts as `timeout`; waiting for a busy machine does not
    count."""
    memory_mb: Megabytes = 2048
    """An answer that needs more megabytes of memory counts as `error`."""
    max_failure_share: Share = 0.05
    """A larger share of timeouts and errors stops the run."""

    @property
    def by_source(self) -> dict[str, str]:
        """The scorers by source of problems; `default` is for all other sources."""
        return self.type if isinstance(self.type, dict) else {"default": self.type}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "default" not in self.by_source:
            raise ValueError(f"type={self.type!r} names no scorer for other sources: add default: math-verify")
        return self


class Reward(Knobs):
    """The reward of each turn in training: r = clip((x - bias) * scaling - overlong, ±max_clip), x from the score.

    A turn that answers nothing, such as a call of a tool, has only the penalty for its length: r = clip(-overlong).
    """

    shape: Literal["success", "raw"] | None = None
    """success: x = (reward - 0.5) * 2, so that rewards of 0 and 1 become -1 and 1. raw: x is the reward as the scorer
    gave it. Empty: `success` where `score.type` is `math-verify` or `code`, whose rewards are verdicts, and `raw` for
    `environment` and your own functions."""
    unfinished: Literal["least", "leave-out"] = "least"
    """Episodes that ended without a verdict. least: where the policy's own behaviour ended them (a full context, too
    many requests, sampling until the deadline), they are trained on with the least reward after their last turn, for
    each unplayed turn if their number is known, otherwise once, and not after a turn that was right by the scorer's
    verdict. Episodes that an error ended are left out. Calls of tools are penalised for length, too, each by the limit
    of its request. leave-out: episodes that failed, and without a critic those with an unknown number of unplayed
    turns, are left out."""
    least: float | None = None
    """The least reward in the scorer's units, such as -1 (with shape `raw` only; with `success` it is that of a wrong
    answer). Empty: the lowest of the update's scores, or 0 if none is below 0. One's own function that ran out of time
    or failed gives no more than this."""
    bias: float = 0.0
    """Subtracted from x."""
    scaling: PositiveFloat = 1.0
    """Factor that multiplies the result after the bias."""
    max_clip: PositiveFloat = 20.0
    """Largest absolute reward."""
    overlong_tokens: NonNegativeInt = 0
    """Number of tokens before `sampling.max_new_tokens` over which the penalty for length rises from 0 to its full
    size, and fewer in proportion where a request had a lower limit; 0: no penalty."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Full size of the penalty for length, at the limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.overlong_tokens == 0:
            refuse_idle(self, "overlong_penalty", why="without overlong_tokens")
        if self.shape == "success" or not self.counts_unfinished:
            refuse_idle(self, "least", why="without shape=raw and unfinished=least")
        return self

    def shape_of(self, scorer: str) -> Literal["success", "raw"]:
        """Return the shape of the rewards of a scorer."""
        return self.shape or ("success" if scorer in ("math-verify", "code") else "raw")

    @property
    def counts_unfinished(self) -> bool:
        """True if episodes that the policy ended without a verdict have the least reward."""
        return self.unfinished == "least"


class Advantage(Knobs):
    """The advantage estimator: group baselines by problem and turn (GRPO, RLOO), or GAE with a critic."""

    type: str = "group"
    """Registered advantage estimator: `group` or `gae`."""
    credit: Literal["causes", "order"] = "causes"
    """Which rewards a turn's return adds up. causes: all that were given when the agent had received the turn, so that
    candidates of one request and requests that ran at once share what follows, and earn nothing of each other's past.
    order: all that follow in the order in which turns are stored."""
    baseline: Literal["turn", "episode", "mixed"] = "mixed"
    """Episodes of the group with which a turn is compared (type `group` only): those that reached this turn (`turn`);
    all, each with its return at this turn or at its last one before (`episode`: plain GRPO if the reward comes at the
    end); or those that reached it, but all if at most three did (`mixed`)."""
    scale_by_std: bool = False
    """Divide by the standard deviation of the group (type `group` only)."""
    scale_penalties: bool = False
    """Let `scale_by_std` and `normalisation` count and divide KL penalties in the reward, too. False: they divide what
    comes from the rewards only, so kl_ctl is in units of divided rewards, as with `kl.place=loss` (type `group` only).
    """
    leave_one_out: bool = False
    """Compare an episode with the mean of the other episodes of its group (RLOO; type `group` only)."""
    discount: Share = 1.0
    """Discount from one token to the next within a turn (type `gae` only). The agent's `turn_discount` applies from
    turn to turn."""
    gae_lambda: Share = 1.0
    """Lambda of GAE (type `gae` only): 1 uses whole returns, 0 uses only the next value. Below 1 the turns of an
    episode must be a chain, unless `credit=order` takes them for one."""
    normalisation: Literal["none", "batch", "group"] = "batch"
    """`batch` normalises over the action tokens of all episodes, `group` over those of each problem, `none` not at all.
    With type `gae`: (A - mean) / (std + 1e-5). With type `group`: A / (root mean square + 1e-5), because its baselines
    already centre A; groups whose rewards agree stay at 0."""
    bound: PositiveFloat | None = 10.0
    """Largest normalised advantage in the loss: a few episodes that differ from all others are divided by more than the
    standard deviation or root mean square; empty: no bound."""


class Critic(Knobs):
    """The critic, which predicts values of action tokens for `gae`."""

    model: Literal["value-head", "own"] = "value-head"
    """A head on the last hidden states of the policy, or a separate model that starts as policy version 0."""
    lr: PositiveFloat | None = None
    """Learning rate of the head or of the separate model; empty: `optimizer.lr`."""
    value_eps_clip: PositiveFloat = 0.2
    """Largest change of a value in an update, in normalised units."""
    value_loss_coefficient: PositiveFloat = 0.1
    """Weight of the value loss relative to the policy loss; value-head only."""
    value_norm: Literal["none", "exp", "ma"] = "exp"
    """Normalisation of returns by mean and standard deviation: exponential (`exp`) or plain running (`ma`) ones."""
    value_norm_beta: Annotated[float, Field(gt=0, lt=1)] = 0.99995
    """Decay of the exponential mean and standard deviation in each update."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model == "own":
            refuse_idle(self, "value_loss_coefficient", why="with model=own, which has an optimizer of its own")
        if self.value_norm != "exp":
            refuse_idle(self, "value_norm_beta", why="without value_norm=exp")
        return self


class KL(Knobs):
    """The KL penalty, which keeps the policy close to the reference policy; 0 as `kl_ctl` turns it off."""

    kl_ctl: NonNegativeFloat = 0.0
    """Coefficient, such as 0.1; the start value if adaptive. 0: no penalty and no reference policy."""
    place: Literal["reward", "loss"] = "reward"
    """Subtract the penalty from the rewards of the tokens, or add it to the loss."""
    estimator: KLEstimator | None = None
    """Estimator of the KL from d = logp - logp_reference: d (k1), d²/2 (k2) or exp(-d) - 1 + d (k3). Empty: k1 in the
    reward, k3 in the loss, because the gradient of k1 in the loss is 0 on average."""
    adaptive: bool = False
    """Raise and lower kl_ctl to keep the KL of a trajectory near the target (reward only)."""
    target: PositiveFloat = 6.0
    """Target KL of a trajectory in nats (adaptive only)."""
    horizon: PositiveFloat = 10000.0
    """Number of trajectories over which kl_ctl follows (adaptive only)."""
    reference: Literal["fixed", "ema"] = "fixed"
    """Reference policy: policy version 0, or the moving average of all versions."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Weight of the old average in each update (reference `ema` only)."""

    @property
    def in_reward(self) -> bool:
        return self.kl_ctl > 0 and self.place == "reward"

    @property
    def in_loss(self) -> bool:
        return self.kl_ctl > 0 and self.place == "loss"

    @property
    def chosen_estimator(self) -> KLEstimator:
        return self.estimator or ("k1" if self.place == "reward" else "k3")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_ctl == 0:
            refuse_idle(self, "place", "estimator", "adaptive", "reference", why="without kl_ctl: set kl_ctl=0.1")
        if self.place == "loss":
            refuse_idle(self, "adaptive", why="with place=loss: use place=reward")
        if not self.adaptive:
            refuse_idle(self, "target", "horizon", why="without adaptive=true")
        if self.reference != "ema":
            refuse_idle(self, "ema_decay", why="without reference=ema")
        return self


class BehaviourWeight(Knobs):
    """The weight w = proximal / behaviour probability, which corrects for tokens that another policy sampled."""

    cap: PositiveFloat | None = 5.0
    """Largest w; empty: no limit."""
    floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A token whose w is below this has weight 0, as in IcePop and MIS; empty: no limit."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Replacement of a larger w: the cap (truncate), or 0 (mask)."""
    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own w. `sequence`: all tokens of a sequence have the geometric mean of their w."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cap is None:
            refuse_idle(self, "mode", why="without a cap")
        if self.cap is not None and self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}: no token would be trained on")
        return self


class Parallel(Knobs):
    """The mesh of the trainer's ranks. All meshes compute the same up to rounding, and the same mesh the same bits."""

    replicate: PositiveInt = 1
    """Number of copies of the model: each trains on its share of the tokens."""
    shard: PositiveInt = 1
    """Number of ranks among which each copy's weights, gradients and moments are divided (FSDP2); each of these ranks
    trains on tokens of its own, too."""

    @property
    def ranks(self) -> int:
        """The number of ranks, replicate x shard."""
        return self.replicate * self.shard

    @model_validator(mode="before")
    @classmethod
    def _others(cls, values: Any) -> Any:
        if isinstance(values, dict) and (others := [name for name in values if _OTHER_PARALLEL.search(str(name))]):
            raise ValueError(
                f"{others[0]}: there is neither tensor nor context parallelism. With several micro-batches, the tensor "
                "parallelism of transformers sums some gradients (Qwen3's q_norm and k_norm) several times; context "
                "parallelism was not tried. Use shard for a model that does not fit one device"
            )
        return values


class PPO(Knobs):
    advantage: Advantage = Advantage()
    """Knobs of the advantages, which are computed from rewards."""
    critic: Critic | None = None
    """Critic for `gae`; `ppo.critic={}` makes one with the defaults."""
    kl: KL = KL()
    """KL penalty and its reference policy."""
    eps_clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: PositiveFloat | None = None
    """Sets another upper bound, 1 + eps_clip_higher (asymmetric clip); empty: eps_clip."""
    c_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: if A < 0, the surrogate is never below c_clip * A; empty: no dual clip."""
    use_decoupled_loss: bool = True
    """Clip around the proximal policy and weight by proximal/behaviour; false: plain PPO."""
    recompute_logprob: bool = True
    """Let the trainer recompute the proximal logprobs; false uses the behaviour logprobs instead, which is right
    on-policy only."""
    behaviour_weight: BehaviourWeight = BehaviourWeight()
    """Weight of the decoupled objective."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the bonus for the entropy of the action tokens' distributions."""
    early_stop_imp_ratio: Annotated[float, Field(gt=1)] | None = 5.0
    """A minibatch whose mean ratio is above this does not change the policy, and is counted; empty: no limit."""
    mask_truncated: bool = False
    """Exclude turns that the token limit cut from the loss."""
    epochs: PositiveInt = 1
    """Number of passes of an update over its data (sample reuse)."""
    ppo_n_minibatches: PositiveInt = 4
    """Number of optimizer steps in an epoch, each on a random share of the groups."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest number of tokens in one forward pass, padding included. Empty: a number for the device
    (`tasks/train/batches.py`); a run that was begun with another one keeps that."""
    logprob_chunk_tokens: PositiveInt = 4096
    """Number of tokens whose full-vocabulary logits exist at the same time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Number format of the forward pass; weights and optimizer stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    threads: Workers = 2
    """Number of CPU threads of the trainer; of each rank if there are several."""
    parallel: Parallel = Parallel()
    """The mesh of the trainer's ranks. More than one needs `trainer.launcher=torchrun`."""

    @property
    def needs_first(self) -> bool:
        """True if training needs policy version 0, for a reference policy or a critic of its own."""
        return self.kl.kl_ctl > 0 or (self.critic is not None and self.critic.model == "own")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        advantage = self.advantage
        if advantage.type == "gae" and self.critic is None:
            raise ValueError("advantage.type='gae' needs values: set ppo.critic={} for a critic with the defaults")
        if advantage.type == "group" and self.critic is not None:
            raise ValueError(
                "advantage.type='group' uses no critic: set ppo.advantage.type=gae, or leave ppo.critic out"
            )
        if advantage.type == "gae":
            refuse_idle(advantage, "scale_by_std", "leave_one_out", why="with advantage.type=gae")
        if advantage.type == "group":
            refuse_idle(advantage, "discount", "gae_lambda", why="with advantage.type=group")
        if advantage.normalisation == "none":
            refuse_idle(advantage, "bound", why="with advantage.normalisation=none")
        if not (self.use_decoupled_loss and self.recompute_logprob):
            why = "in behaviour_weight: w is 1 with use_decoupled_loss=false or recompute_logprob=false"
            refuse_idle(self.behaviour_weight, "cap", "floor", "level", why=why)
        return self


class Trainer(Knobs):
    """Start, time limits and restarts of the trainer's ranks. No knob here changes a number."""

    launcher: Literal["in-process", "torchrun", "ray"] = "in-process"
    """in-process: one trainer in the flow's process. torchrun: `ppo.parallel` ranks, which live through the flow. ray:
    these ranks on `hosts` nodes of the cluster (`cluster.address`)."""
    hosts: PositiveInt = 1
    """Number of hosts with equally many ranks. The flow starts those of its own host, which has the first ranks; the
    others are started beside it (`tasks/train/README.md`)."""
    address: Annotated[str, Field(pattern=rf"^{_HOST_AND_PORT}$")] | None = None
    """Name or IP address of the flow's host in the network of the hosts, with a free port: `10.0.0.1:29500`. Empty, for
    one host: the loopback address and any free port."""
    timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait of a rank for the others, for example until the first one of its host has fetched a checkpoint.
    After it, all ranks end: one of them hangs, or a host is unreachable."""
    startup_timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait in each step of starting the ranks. On other hosts than the flow's it must also cover what the flow
    does before it opens its trainer, such as making policy version 0."""
    max_restarts: NonNegativeInt = 0
    """Number of times in a flow run that all ranks start again, from the last checkpoint, after one was lost."""


class Cluster(Knobs):
    """Rollout workers on the nodes of a Ray cluster. No knob here changes a number."""

    address: Annotated[str, Field(pattern=rf"^(auto|{_HOST_AND_PORT})$")] | None = None
    """Ray cluster that plays the episodes: `auto` for the one that this host belongs to, or `host:port` of its head.
    Empty: this machine alone, without Ray."""
    rollout_workers: PositiveInt | None = None
    """Largest number of nodes that play episodes, with one worker each. Empty: all nodes with room for one, also those
    that join later."""
    judges: NonNegativeInt | None = None
    """Largest number of nodes that play nothing, but help to grade. Empty: all others. Nodes that play grade, too, each
    with `score.workers` processes."""
    gpus_per_worker: NonNegativeInt | None = None
    """GPUs that a node must have free for a worker. Empty: as many as its `inference.replicas` servers need, or none
    with the CPU build of vLLM."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for the first rollout worker, and for another one after all were lost."""
    silence_s: Annotated[float, Field(ge=5)] = 60.0
    """A worker that has not answered for so many seconds is lost: others play its episodes."""


class Optimizer(Knobs):
    """The optimizer, AdamW."""

    lr: PositiveFloat = 2e-5
    """Learning rate after warm-up."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    betas: Annotated[tuple[Decay, Decay], PlainSerializer(list)] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-5
    """Added to the root of the second moment. Large models need 1e-8: their gradients are so small that 1e-5 would
    shorten all steps. The metric `optimizer/median_sqrt_v` and an alarm show this."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises from zero. It is not a share of all steps, because
    `run.iterations` may be raised later."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""


class Evaluation(Knobs):
    every: PositiveInt = 10
    """Evaluate on the held-out problems before the first iteration, after each multiple of this number and after the
    last iteration."""
    sets: dict[Name, Source] = {}
    """Evaluation sets by name, in addition to `held-out`; for `evaluate` and `retrain`."""
    samples: NonNegativeInt = 0
    """Number of sampled episodes of each problem, in addition to the greedy one, for pass@k; 0: none. For `evaluate`
    and `retrain`."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Temperature of the sampled episodes, 0.01 to 2."""
    max_failed_share: Share = 0.01
    """Largest share of episodes that failed by the set-up's fault, or of failed verdicts. Above it the evaluation is an
    error, and is played again."""
    contamination: Literal["stop", "drop", "report"] = "stop"
    """Reaction of `retrain` to training problems that are also in an evaluation set."""
    fingerprints: dict[Name, str] = {}
    """Versions (`problems/…`) that the sets must have in `retrain`, or `removed`; empty: those of earlier nights."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if HELD_OUT in self.sets:
            raise ValueError(f"sets: {HELD_OUT!r} is the name of problems.held_out: choose another")
        if self.samples == 0:
            refuse_idle(self, "temperature", why="without samples")
        return self


class Gate(Knobs):
    """The checks that decide whether a challenger replaces the champion.

    Intervals are 95 % confidence intervals, paired over the problems of a set.
    """

    measure: Literal["first_turn", "any_turn"] = "first_turn"
    """An episode counts as right if its first answer is right (first_turn), or if any of its answers is (any_turn)."""
    episodes: Literal["greedy", "sampled"] = "greedy"
    """Compare the accuracy of the greedy episode of each problem, or the mean over `evaluation.samples` sampled ones.
    PPO raises that mean, and it depends less on luck: a small update changes many greedy answers."""
    target: Name = "held-out"
    """On this set the challenger must be better: the whole interval of the difference must be above `least_gain`, and
    the p value of McNemar's test (for sampled episodes, of a permutation test) must be small enough for
    `max_by_luck`. The p value is not checked if `least_gain` is negative."""
    max_by_luck: Annotated[float, Field(gt=0, le=0.5)] | None = 0.05
    """Largest probability that a challenger without any gain is promoted, over all nights until a promotion: the nights
    share it, the first one gets a quarter (p at most 0.025), and each later one less. The interval on the target has
    the same confidence. Empty: p at most 0.05 on each night, by which luck promotes one in a few dozen nights."""
    least_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Least gain on the target; 0 asks for any certain gain."""
    guarded: list[Name] | None = None
    """On these sets the challenger must not be worse; empty: on all sets."""
    margin: Share = 0.05
    """On guarded sets the whole interval of the difference must be above minus this. Small sets have wide intervals:
    about ±0.06 with 200 problems, ±0.03 with 1,000."""
    max_failed_verdicts: Share = 0.02
    """Alarm if a larger share of the verdicts in training are timeouts or errors."""
    max_kl: PositiveFloat = 1.0
    """Alarm if the challenger's sampled tokens are further from the champion than this, in nats per token."""
    max_length_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Alarm if the challenger's answers are longer than the champion's by more than this factor."""
    max_truncated_gain: Share = 0.1
    """Alarm if the share of episodes that a token limit cut rose by more."""
    hacking_gain: Share = 0.02
    """Alarm if success on the training problems rose by more than this, while accuracy on the target fell by more than
    this."""


class Retrain(Knobs):
    """Scheduled retraining: `run.name` names the series, whose nights are the runs `<name>-0001`, `<name>-0002` …"""

    champion: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = "champion"
    """Alias of the champion. If it does not exist yet, `policy` becomes the first champion."""
    min_new: PositiveInt = 1
    """Least number of new problems for a night; fewer wait for more."""
    replay: Decay = 0.5
    """Share of a night's problems that come from earlier promoted nights, so that the policy does not forget them."""
    gate: Gate = Gate()
    """Checks that compare the challenger with the champion."""


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
    def _storable(self) -> Self:
        values = self.model_dump()
        check_plain(values)
        check_strings(values)
        return self

    @model_validator(mode="after")
    def _warm_start_fits(self) -> Self:
        warm_start = self.policy.warm_start
        if warm_start and not warm_start.teaches and self.problems.train.kind != "arithmetic":
            raise ValueError(
                f"policy.warm_start teaches arithmetic, but problems.train.kind={self.problems.train.kind!r}: "
                "give policy.path, or policy.warm_start.teaches={kind: arithmetic}"
            )
        if warm_start and warm_start.tool_share and not any(tool.type == "calculator" for tool in self.agent.tools):
            raise ValueError(
                f"policy.warm_start.tool_share={warm_start.tool_share:g} teaches calls of a tool that agent.tools does "
                "not offer: set agent.tools=[calculator], or tool_share to 0"
            )
        if warm_start and self.agent.tools and not warm_start.tool_share:
            raise ValueError(
                "agent.tools: the tiny model of policy.warm_start would not be shown them: set policy.warm_start."
                "tool_share=0.3 as the configuration demo-tools does, or give policy.path"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        sampling, rollout = self.sampling, self.rollout
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy and cannot be trained on: use 1.0")
        if (sampling.top_p < 1 or sampling.top_k > 0) and not rollout.allow_biased_sampling:
            raise ValueError(
                f"sampling.top_p={sampling.top_p}, sampling.top_k={sampling.top_k} bias the recorded logprobs: "
                "use 1.0 and 0, or set rollout.allow_biased_sampling=true"
            )
        if self.ppo.ppo_n_minibatches > rollout.problems_per_iteration:
            raise ValueError(
                f"ppo.ppo_n_minibatches={self.ppo.ppo_n_minibatches} is more than rollout.problems_per_iteration="
                f"{rollout.problems_per_iteration}: a minibatch holds whole groups"
            )
        if self.ppo.advantage.type == "group" and rollout.group_size == 1:
            raise ValueError("rollout.group_size=1 leaves the group baseline nothing to compare: use 2 or more")
        if self.retrain.gate.episodes == "sampled" and not self.evaluation.samples:
            raise ValueError("retrain.gate.episodes=sampled needs sampled episodes: set evaluation.samples=8 or so")
        if sampling.max_new_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"sampling.max_new_tokens={sampling.max_new_tokens} does not fit into "
                f"inference.max_model_len={self.inference.max_model_len}"
            )
        if self.inference.urls and self.inference.swap == "restart":
            raise ValueError(
                "inference.swap=restart needs servers that the pipeline starts, but inference.urls is set: use reload"
            )
        self._copies_possible()
        self._groups_possible()
        self._ranks_possible()
        self._cluster_possible()
        self._processes_possible()
        self._staleness_possible()
        self._gate_possible()
        return self

    def _copies_possible(self) -> None:
        storage = self.storage
        if storage.serving_copy and self.inference.dtype != "bfloat16":
            raise ValueError(
                f"storage.serving_copy adds weights in bfloat16, which inference.dtype={self.inference.dtype} does not "
                "serve: set inference.dtype=bfloat16, or leave the copy out"
            )
        if not storage.serving_copy:
            refuse_idle(storage, "whole_copy_every", why="without storage.serving_copy")
        if storage.whole_copy_every > 1 and "://" not in storage.root:
            raise ValueError(
                f"storage.whole_copy_every={storage.whole_copy_every} saves downloads, but storage.root={storage.root} "
                "is a folder: leave it out"
            )

    def _gate_possible(self) -> None:
        sets, gate = [HELD_OUT, *self.evaluation.sets], self.retrain.gate
        for knob, names in (("target", [gate.target]), ("guarded", gate.guarded or [])):
            if unknown := [name for name in names if name not in sets]:
                raise ValueError(
                    f"retrain.gate.{knob}={unknown[0]!r} is not an evaluation set; use one of {', '.join(sets)}"
                )

    def _groups_possible(self) -> None:
        rollout, limit = self.rollout, self.sampling.max_new_tokens
        if (rollout.generation_size or rollout.group_size) < rollout.group_size:
            raise ValueError(
                f"rollout.generation_size={rollout.generation_size} is below rollout.group_size={rollout.group_size}: "
                "play at least as many episodes as are trained on"
            )
        if rollout.success_rate_lb > rollout.success_rate_ub:
            raise ValueError(
                f"rollout.success_rate_lb={rollout.success_rate_lb:g} is above success_rate_ub="
                f"{rollout.success_rate_ub:g}: every group would be rejected"
            )
        if all(self.reward.shape_of(scorer) == "success" for scorer in self.score.by_source.values()):
            refuse_idle(self.reward, "least", why="where all scorers give verdicts: the least is a wrong answer's")
        if self.reward.overlong_tokens >= limit:
            raise ValueError(
                f"reward.overlong_tokens={self.reward.overlong_tokens} must be below sampling.max_new_tokens={limit}"
            )

    def _ranks_possible(self) -> None:
        parallel, trainer, rollout = self.ppo.parallel, self.trainer, self.rollout
        mesh = f"ppo.parallel={{replicate: {parallel.replicate}, shard: {parallel.shard}}}"
        if trainer.launcher == "in-process" and parallel.ranks > 1:
            raise ValueError(
                f"{mesh} needs {parallel.ranks} processes, but trainer.launcher=in-process has one: "
                "set trainer.launcher=torchrun"
            )
        if trainer.launcher == "in-process" and trainer.hosts > 1:
            raise ValueError(f"trainer.hosts={trainer.hosts} needs trainer.launcher=torchrun")
        if trainer.launcher == "ray" and self.cluster.address is None:
            raise ValueError("trainer.launcher=ray needs a cluster: set cluster.address=auto or so")
        if trainer.launcher == "ray" and trainer.address:
            raise ValueError("trainer.address has no effect with trainer.launcher=ray: the ranks find a free port")
        if trainer.launcher == "torchrun" and trainer.hosts > 1 and trainer.address is None:
            raise ValueError(
                f"trainer.hosts={trainer.hosts} needs the address at which the other hosts reach this one: "
                "set trainer.address=10.0.0.1:29500 or so"
            )
        if parallel.ranks % trainer.hosts:
            raise ValueError(
                f"{mesh} has {parallel.ranks} ranks, which {trainer.hosts} hosts cannot share equally: change "
                "trainer.hosts, replicate or shard"
            )
        episodes = rollout.problems_per_iteration * rollout.group_size // self.ppo.ppo_n_minibatches
        if parallel.ranks > episodes:
            raise ValueError(
                f"{mesh} has {parallel.ranks} ranks, but a minibatch has only {episodes} episodes: use fewer ranks, "
                "lower ppo.ppo_n_minibatches, or raise rollout.problems_per_iteration"
            )

    def _cluster_possible(self) -> None:
        if self.cluster.address is None:
            others = [name for name in Cluster.model_fields if name != "address"]
            refuse_idle(self.cluster, *others, why="without cluster.address")
        elif self.inference.urls:
            raise ValueError(
                "cluster.address starts vLLM servers on the cluster's nodes, but inference.urls names others: "
                "leave one of the two out"
            )
        elif self.storage.root.startswith("memory://"):
            raise ValueError("storage.root=memory://… is in this process only: a cluster needs s3://bucket/prefix")

    def _processes_possible(self) -> None:
        count, servers = self.rollout.processes, len(self.inference.urls) or self.inference.replicas
        if count == 1:
            return
        if count > servers:
            raise ValueError(
                f"rollout.processes={count}, but there are only {servers} vLLM server(s), and each process needs its "
                "own: lower it, or raise inference.replicas"
            )
        if self.cluster.address:
            raise ValueError(
                f"rollout.processes={count} is for this host alone: with cluster.address each node has one process"
            )
        if self.storage.root.startswith("memory://"):
            raise ValueError(
                f"storage.root=memory://… is in this process only: rollout.processes={count} needs a folder or "
                "s3://bucket/prefix"
            )

    def _staleness_possible(self) -> None:
        rollout, oldest = self.rollout, self.rollout.max_head_offpolicyness
        if self.run.overlap and oldest < 1:
            raise ValueError(
                "run.overlap trains on trajectories of an older policy: set rollout.max_head_offpolicyness=1 or more"
            )
        if self.run.overlap and self.inference.swap == "restart":
            raise ValueError(
                "run.overlap keeps requests during a swap of weights, but inference.swap=restart loses them: use reload"
            )
        if rollout.policy_lag > oldest:
            raise ValueError(
                f"rollout.policy_lag={rollout.policy_lag} is more than rollout.max_head_offpolicyness={oldest}: "
                "all trajectories would be too old to train on"
            )
        if rollout.policy_lag and self.run.overlap:
            raise ValueError("rollout.policy_lag and run.overlap both choose the policy that plays: use one of them")
        if oldest and self.ppo.use_decoupled_loss and not self.ppo.recompute_logprob:
            raise ValueError(
                f"ppo.recompute_logprob=false is right on-policy only, but rollout.max_head_offpolicyness={oldest}"
            )
