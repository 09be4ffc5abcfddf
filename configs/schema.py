"""Every knob of the pipeline, on one page, documented where it is declared.

A configuration is read from YAML, merged with dotted overrides, validated into a frozen
`Config` (see `configs.loader`) and written into every manifest, so that a data set or a
checkpoint says how it was made. Unknown keys are refused.
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
Column = Literal["id", "prompt", "solutions"]
KLEstimator = Literal["k1", "k2", "k3"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


URI = Annotated[str, AfterValidator(check_uri)]
LONGEST_LEASE_S = 9e9
"""The longest time that a thread can wait."""
LONGEST_VERDICT_S = 9e8
"""A tenth of the longest time that a thread can wait: the pipeline waits ten times as long for a judge."""
MOST_PAIRS = 10**8
"""Largest number of pairs of operands: all of them are listed before some are drawn."""


def _exclusions_version(version: str) -> str:
    if not re.fullmatch(r"exclusions/[0-9a-f]+", version):
        raise ValueError(
            f"{version!r} is no version such as exclusions/1f0c4a7be23d5566: `python -m tasks.provenance exclude` "
            "prints them, `python -m storage ls --kind exclusions` lists them; an alias may move, so it is not allowed"
        )
    return version


HELD_OUT = "held-out"
"""Name of `problems.held_out` among the evaluation sets."""


class Run(Knobs):
    name: Name
    """Name of the run. The same name continues where it stopped."""
    seed: Seed = 1
    """All other seeds derive from it, the iteration, the problem, the sample and the turn."""
    iterations: NonNegativeInt
    """Rollout-score-train rounds. Raising it later continues the same run."""
    max_tokens: PositiveInt | None = None
    """End early after so many sampled tokens, with what is committed; empty: no bound."""
    max_minutes: PositiveFloat | None = None
    """End early after so many minutes of one flow run; raising either bound later continues the same run."""
    overlap: bool = False
    """Play the next iteration while this one trains; needs `rollout.max_head_offpolicyness` of 1 or more."""
    when_held: Literal["stop", "wait"] = "stop"
    """What to do while another flow run writes the same run: stop and say who, or wait for its end."""
    lease_s: Annotated[float, Field(gt=0, le=LONGEST_LEASE_S)] = 60.0
    """A flow run on another machine counts as dead after so many seconds without a sign of life."""


class Storage(Knobs):
    root: Annotated[URI, AfterValidator(check_place)] = "./var"
    """Where versions live: a local folder, `memory://name` or `s3://bucket/prefix`."""
    cache: Annotated[str, AfterValidator(check_place)] = "./var/cache"
    """Local folder for versions of a remote root, and for logs of servers."""
    cache_gib: PositiveFloat = 100.0
    """Of a remote root so much is kept there; what was not used for longest goes first."""
    request_timeout_s: PositiveFloat = 30.0
    """S3: an answer that takes longer is given up, and the request sent again."""
    patience_s: PositiveFloat = 600.0
    """S3: how long an operation is tried before the run fails."""


class ArithmeticSource(Knobs):
    """`a + b` and `a - b`, generated. A problem's split depends on nothing but its text."""

    kind: Literal["arithmetic"]
    split: Literal["train", "held-out"] = "train"
    """Train and held-out never share a problem, whatever the seeds and ranges."""
    low: int = 0
    """Smallest operand."""
    high: int = 20
    """Largest operand."""
    operators: Annotated[list[Literal["+", "-", "*"]], Field(min_length=1)] = ["+", "-"]
    """Operators to draw from."""
    count: PositiveInt | None = None
    """How many to take after shuffling; all of them where empty."""
    seed: int = 0
    """Seed of the shuffle."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high={self.high} is below low={self.low}: set high to {self.low} or more")
        if (pairs := len(set(self.operators)) * (self.high - self.low + 1) ** 2) > MOST_PAIRS:
            raise ValueError(f"{brief(pairs)} problems to draw from are more than {MOST_PAIRS:,}: lower high")
        return self


class FileSource(Knobs):
    """Rows of a JSONL or Parquet file."""

    kind: Literal["jsonl", "parquet"]
    path: URI
    """Path or URI of the file, or a pattern for several (`new/*.jsonl`); their ids then begin with the file's name."""
    preset: Literal["gsm8k", "math", "areal"] | None = None
    """Field mapping of a known data set; or give `fields`."""
    fields: dict[Column, str] = {}
    """Own mapping: which column holds the id (optional), the prompt and the solution(s)."""
    count: PositiveInt | None = None
    """Take the first rows only."""
    max_line_mb: Megabytes = 16
    """A longer line, or row of a Parquet file, is a bad row: what has no line ends would fill the memory."""

    @model_validator(mode="after")
    def _mapping(self) -> Self:
        _check_mapping(self.preset, self.fields)
        return self


class HubSource(Knobs):
    """A Hugging Face data set by name."""

    kind: Literal["hub"]
    name: str
    """Data set name, such as `openai/gsm8k`, or a local data set folder."""
    subset: str | None = None
    """Configuration of the data set, such as `main`."""
    split: str = "train"
    """Split of the data set."""
    preset: Literal["gsm8k", "math", "areal"] | None = None
    """Field mapping of a known data set; or give `fields`."""
    fields: dict[Column, str] = {}
    """Own mapping: which column holds the id (optional), the prompt and the solution(s)."""
    count: PositiveInt | None = None
    """Take the first rows only."""

    @model_validator(mode="after")
    def _mapping(self) -> Self:
        _check_mapping(self.preset, self.fields)
        return self


class StoredSource(Knobs):
    """A problem set that the store holds already."""

    kind: Literal["stored"]
    version: Annotated[str, Field(pattern=r"^problems/[0-9a-f]+$")]
    """Its version, such as `problems/1f0c4a7be23d5566`."""


def _check_mapping(preset: str | None, fields: dict[Column, str]) -> None:
    if bool(preset) == bool(fields):
        raise ValueError("give either preset (gsm8k, math, areal) or fields (prompt and solutions), not both")
    if fields and not {"prompt", "solutions"} <= fields.keys():
        raise ValueError(f"fields={fields} must name the columns of prompt and of solutions")


Source = Annotated[ArithmeticSource | FileSource | HubSource | StoredSource, Field(discriminator="kind")]


class ProblemSampling(Knobs):
    """Which problems a run draws, by what became of them in the runs before it (`python -m flows.history`)."""

    prefer: Literal["all", "middle"] = "all"
    """`all` passes through all problems before any repeats; `middle` draws those more often that are neither always
    nor never solved."""
    retire_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out problems that are solved so often; 0.95 is usual."""
    leave_out_suspects: bool = False
    """Leave out problems that were never solved: their gold answers may be wrong."""
    least_episodes: PositiveInt = 16
    """Of a problem with fewer episodes nothing is known yet: it is drawn like one of the middle."""
    last_episodes: PositiveInt = 64
    """The success rate is that of about so many newest episodes of a problem."""

    @property
    def active(self) -> bool:
        return self.prefer != "all" or self.retire_at is not None or self.leave_out_suspects

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.last_episodes < self.least_episodes:
            raise ValueError(
                f"last_episodes={self.last_episodes} is below least_episodes={self.least_episodes}: "
                "of no problem would enough be known"
            )
        return self


class Problems(Knobs):
    train: Source
    """What the policy is trained on."""
    held_out: Source
    """What it is evaluated on."""
    sampling: ProblemSampling = ProblemSampling()
    """Which of `train` are drawn how often."""
    exclusions: list[Annotated[str, AfterValidator(_exclusions_version)]] = []
    """Versions (`exclusions/…`) of what is not trained on, as `python -m tasks.provenance exclude` makes them: their
    trajectories enter no update, their problems are not drawn. May change while a run lasts. What a warm start
    teaches is not affected."""
    max_bad_share: Share = 0.01
    """Bad rows are dropped and reported; a larger share of them is an error."""


class WarmStart(Knobs):
    """A tiny Qwen3 and its tokenizer, made and taught from nothing on the arithmetic generator."""

    teaches: ArithmeticSource | None = None
    """What it is taught; empty: `problems.train`, which is then arithmetic."""
    hidden_size: Annotated[int, Field(gt=0, le=2**16)] = 128
    """Width of the model: `heads` times an even number."""
    layers: Annotated[int, Field(gt=0, le=1000)] = 3
    """Number of layers."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 2
    """Key-value heads, of which `heads` is a multiple."""
    steps: PositiveInt = 1000
    """Supervised steps at most."""
    target_accuracy: Share = 0.45
    """Stop when the mean probability of a whole right answer reaches this on what is taught."""
    batch_size: PositiveInt = 64
    """Examples in a step."""
    lr: PositiveFloat = 1e-3
    """Learning rate after a short rise."""
    two_turn_share: Share = 0.25
    """Share of the examples in which a wrong first answer, masked out of the loss, is corrected."""

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
    """A transformers folder, a committed checkpoint's URI, or a hub name. Weights are safetensors and not quantised.
    What cannot be trained or played is refused; until policy version 0 is committed, the run goes on with another."""
    warm_start: WarmStart | None = None
    """Make a tiny policy instead."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.warm_start is None):
            raise ValueError("give exactly one of policy.path and policy.warm_start")
        return self


class Agent(Knobs):
    type: str = "math-multi-turn"
    """Registered name, or `package.module:Class` for one's own."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; checked before anything starts."""


class Environment(Knobs):
    type: str = "math-verify"
    """Registered name, or `package.module:Class` for one's own."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; checked before anything starts."""


class Sampling(Knobs):
    temperature: Temperature = 1.0
    """0.01 to 2. 0 is greedy, which cannot be trained on."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the logprobs are biased."""
    top_k: NonNegativeInt = 0
    """0 keeps all tokens; anything else biases the logprobs."""
    max_new_tokens: PositiveInt = 1024
    """Longest completion of one turn."""


class Rollout(Knobs):
    problems_per_iteration: PositiveInt = 32
    """Problems drawn for an iteration, in an order that passes through all before any repeats."""
    group_size: PositiveInt = 16
    """Episodes of each problem that are trained on."""
    generation_size: PositiveInt | None = None
    """Episodes of each problem that are played; the best `group_size` of them are trained on. Empty: all."""
    success_rate_lb: Share = 0.0
    """A group with a smaller share of right turns is rejected and another problem drawn in its place."""
    success_rate_ub: Share = 1.0
    """A group with a larger share of right turns is rejected, too; 0.01 and 0.99 leave out all that agree."""
    max_resampling_rounds: NonNegativeInt = 2
    """How often rejected groups are replaced; what is then missing makes a smaller batch, if need be an empty one."""
    max_head_offpolicyness: NonNegativeInt = 0
    """Oldest policy that may be trained on, in versions behind the one in training; older trajectories are left out."""
    policy_lag: NonNegativeInt = 0
    """Play with the policy so many versions behind the newest: staleness on purpose, for experiments."""
    concurrency: PositiveInt = 512
    """Episodes in flight at once (whole groups)."""
    episode_deadline_s: PositiveFloat = 600
    """An episode that takes longer is kept as failed; time for which another one held up all others is not counted."""
    request_timeout_s: PositiveFloat = 300
    """A request that takes longer is sent again."""
    request_retries: NonNegativeInt = 5
    """How often a failed request is sent again."""
    max_failed_share: Share = 0.1
    """A larger share of failed episodes stops the run: something is wrong with the set-up."""
    rows_per_shard: PositiveInt = 256
    """Trajectories in one Parquet shard; a shard is written as soon as it is full."""
    allow_biased_sampling: bool = False
    """Train although top_p or top_k bias the recorded logprobs."""


class Inference(Knobs):
    urls: list[Annotated[URI, AfterValidator(check_server)]] = []
    """vLLM servers to use, such as http://127.0.0.1:8000 or unix:///run/vllm; empty starts `replicas` of our own.
    They need --enable-scale-out, VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and
    a view of the checkpoint files; their API key is read from the environment (VLLM_API_KEY). A command does
    not know what they serve: its first swap sets their weights to 0, so the canary proves that others were loaded."""
    replicas: PositiveInt = 1
    """Servers to start when no URLs are given. Each gets GPUs of its own out of CUDA_VISIBLE_DEVICES, or else of all:
    as many as the parallel sizes in `extra_args` ask for. Too few are an error. Servers take the last GPUs and the
    trainer the first, which it shares with a server only where none is to spare."""
    swap: Literal["reload", "restart"] = "reload"
    """How new weights get in: in place, or by starting the servers anew (tied embeddings on a CPU)."""
    canary_tolerance: PositiveFloat = 1e-4
    """Largest mean difference between served and own logprobs of a fixed sequence, for errors of the number format.
    Beside it a swap must show that the weights changed: by these logprobs, or by the server's checksums."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the served weights."""
    max_model_len: PositiveInt = 2048
    """Context: prompt, turns and feedback together, in tokens."""
    gpu_memory_utilization: Share = 0.9
    """Share of the GPU's memory that a server takes (GPU only)."""
    kv_cache_gib: PositiveInt = 1
    """Memory for the key-value cache (CPU only)."""
    threads: PositiveInt = 1
    """OpenMP threads of a server (CPU only)."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs: starts sooner, runs slower on GPUs."""
    startup_timeout_s: PositiveFloat = 600
    """A server that is not healthy by then is an error."""
    extra_args: Annotated[list[str], AfterValidator(check_extra_args)] = []
    """More command line arguments for vLLM, such as [--max-num-seqs, "512"]. Those by which it would listen elsewhere,
    serve something else or run code of others are refused."""

    @model_validator(mode="after")
    def _startable(self) -> Self:
        if self.urls:  # the others' servers are as they are
            return self
        if self.gpu_memory_utilization == 0:
            raise ValueError("gpu_memory_utilization=0 leaves a server of our own no memory: use 0.9 or so")
        for name in ("replicas", "threads"):
            if getattr(self, name) > MOST_WORKERS:
                raise ValueError(f"{name} is above {MOST_WORKERS:,}: more no machine starts")
        return self


class Score(Knobs):
    workers: Workers = 2
    """Killable judge processes."""
    timeout_s: Annotated[float, Field(ge=1e-6, le=LONGEST_VERDICT_S)] = 5
    """An answer that needs more seconds of processor time counts as `timeout`; waiting for a busy machine is free."""
    memory_mb: Megabytes = 2048
    """An answer that needs more counts as `error`."""
    max_failure_share: Share = 0.05
    """A larger share of timeouts and errors stops the run."""


class Reward(Knobs):
    """r = clip(((success - 0.5) * 2 - bias) * scaling - overlong, ±max_clip) for each turn."""

    bias: float = 0.0
    """Subtracted from ±1."""
    scaling: PositiveFloat = 1.0
    """Multiplied after the bias."""
    max_clip: PositiveFloat = 20.0
    """Largest absolute reward."""
    overlong_tokens: NonNegativeInt = 0
    """The penalty for length rises from 0 to its full size over the last so many tokens before the limit."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Full size of that penalty, at `sampling.max_new_tokens`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.overlong_tokens == 0:
            refuse_idle(self, "overlong_penalty", why="without overlong_tokens")
        return self


class Advantage(Knobs):
    """Group baselines by problem and turn (GRPO, RLOO), or GAE with a critic."""

    type: str = "group"
    """Registered advantage estimator: `group` or `gae`."""
    scale_by_std: bool = False
    """group: divide by the group's standard deviation."""
    leave_one_out: bool = False
    """group: compare with the mean of the others (RLOO)."""
    discount: Share = 1.0
    """gae: from one token to the next within a turn; `turn_discount` of the agent from turn to turn."""
    gae_lambda: Share = 1.0
    """gae: 1 looks at whole returns, 0 at the next value only."""
    normalisation: Literal["none", "batch", "group"] = "batch"
    """gae: (A - mean) / (std + 1e-5) over the action tokens of all samples (batch), or of each problem's (group).
    group: A / (root mean square + 1e-5); its baselines are centred already, and groups that agree stay at 0. none: as
    they are."""


class Critic(Knobs):
    """Values of action tokens, for `gae`."""

    model: Literal["value-head", "own"] = "value-head"
    """A head on the policy's last hidden states, or a model of its own that begins as policy version 0."""
    lr: PositiveFloat | None = None
    """Learning rate of the head, and of a model of its own; empty is `optimizer.lr`."""
    value_eps_clip: PositiveFloat = 0.2
    """A value may move so far in an update, in normalised units."""
    value_loss_coefficient: PositiveFloat = 0.1
    """Weight of the value loss beside the policy's; value-head only."""
    value_norm: Literal["none", "exp", "ma"] = "exp"
    """Returns are normalised by an exponential or a plain running mean and standard deviation."""
    value_norm_beta: Annotated[float, Field(gt=0, lt=1)] = 0.99995
    """Decay of the exponential one, for each update."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model == "own":
            refuse_idle(self, "value_loss_coefficient", why="with model=own, which has an optimizer of its own")
        if self.value_norm != "exp":
            refuse_idle(self, "value_norm_beta", why="without value_norm=exp")
        return self


class KL(Knobs):
    """A penalty for leaving the reference policy; without a coefficient there is none."""

    kl_ctl: NonNegativeFloat = 0.0
    """Coefficient, such as 0.1; where it starts when adaptive. 0 does without a reference policy."""
    place: Literal["reward", "loss"] = "reward"
    """Subtract the penalty from the rewards of the tokens, or add it to the loss."""
    estimator: KLEstimator | None = None
    """With d = logp - logp_reference: d, d²/2 or exp(-d) - 1 + d. Empty: k1 in the reward, k3 in the loss, where k1
    would pull nowhere on average."""
    adaptive: bool = False
    """Raise and lower kl_ctl to keep the KL of a trajectory near the target (reward only)."""
    target: PositiveFloat = 6.0
    """adaptive: nats of a trajectory."""
    horizon: PositiveFloat = 10000.0
    """adaptive: trajectories over which kl_ctl follows."""
    reference: Literal["fixed", "ema"] = "fixed"
    """Policy version 0, or the moving average of all versions."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """ema: weight of the old average in each update."""

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
    """w = proximal / behaviour, which corrects for tokens that another policy sampled."""

    cap: PositiveFloat | None = None
    """Largest w; empty leaves it as it is."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of a larger one: the cap, or 0."""
    level: Literal["token", "sequence"] = "token"
    """Of each token, or the geometric mean over a sequence for all of its tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cap is None:
            refuse_idle(self, "mode", why="without a cap")
        return self


class PPO(Knobs):
    advantage: Advantage = Advantage()
    """How rewards become advantages."""
    critic: Critic | None = None
    """Values for `gae`; `ppo.critic={}` takes the defaults."""
    kl: KL = KL()
    """Reference policy."""
    eps_clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: PositiveFloat | None = None
    """Another upper bound, 1 + eps_clip_higher (asymmetric clip)."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where A < 0 the surrogate is never below c_clip * A."""
    use_decoupled_loss: bool = True
    """Clip around the proximal policy and weigh by proximal/behaviour; otherwise plain PPO."""
    recompute_logprob: bool = True
    """Proximal logprobs by the trainer; false takes the behaviour's for them, which is right on-policy only."""
    behaviour_weight: BehaviourWeight = BehaviourWeight()
    """The decoupled objective's weight."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Bonus for the entropy of the action tokens' distributions."""
    early_stop_imp_ratio: Annotated[float, Field(gt=1)] | None = 5.0
    """A minibatch whose mean ratio is above it does not change the policy, and is counted."""
    mask_truncated: bool = False
    """No loss on turns that the token limit cut."""
    epochs: PositiveInt = 1
    """How often an update passes over its data (sample reuse)."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps in an epoch, each on a random share of the groups."""
    micro_batch_tokens: PositiveInt = 16384
    """Padded tokens in one forward pass."""
    logprob_chunk_tokens: PositiveInt = 4096
    """Tokens whose full-vocabulary logits exist at one time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Number format of the forward pass; weights and optimizer stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, about a third more time."""
    threads: Workers = 2
    """CPU threads of the trainer."""

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
        if not (self.use_decoupled_loss and self.recompute_logprob):
            why = "in behaviour_weight: w is 1 with use_decoupled_loss=false or recompute_logprob=false"
            refuse_idle(self.behaviour_weight, "cap", "level", why=why)
        return self


class Optimizer(Knobs):
    """AdamW."""

    lr: PositiveFloat = 2e-5
    """Learning rate after warm-up."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    betas: Annotated[tuple[Decay, Decay], PlainSerializer(list)] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: PositiveFloat = 1e-5
    """Added to the root of the second moment. Large models need 1e-8: their gradients are so small that 1e-5 would
    shorten all steps, as the metric `optimizer/median_sqrt_v` and an alarm say."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero. Not a share of all steps: `run.iterations` may be raised."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""


class Evaluation(Knobs):
    every: PositiveInt = 10
    """Evaluate on the held-out problems before the first, after every k-th and after the last iteration."""
    sets: dict[Name, Source] = {}
    """More evaluation sets, by name, beside `held-out`: for `evaluate` and `retrain`."""
    samples: NonNegativeInt = 0
    """evaluate, retrain: sampled episodes of each problem beside the greedy one, for pass@k; 0: none."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Of the sampled ones, 0.01 to 2."""
    max_failed_share: Share = 0.01
    """With a larger share of failed episodes or verdicts an evaluation is none: it is an error, and is played again."""
    contamination: Literal["stop", "drop", "report"] = "stop"
    """retrain: what to do about training problems that stand in an evaluation set, too."""
    fingerprints: dict[Name, str] = {}
    """retrain: versions (`problems/…`) that the sets must have, or `removed`; empty: those of the nights before."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if HELD_OUT in self.sets:
            raise ValueError(f"sets: {HELD_OUT!r} is the name of problems.held_out: choose another")
        if self.samples == 0:
            refuse_idle(self, "temperature", why="without samples")
        return self


class Gate(Knobs):
    """When a challenger replaces the champion. Intervals are 95 %, paired over the problems of a set."""

    measure: Literal["first_turn", "any_turn"] = "first_turn"
    """Whether the first answer is right, or any of an episode's answers."""
    episodes: Literal["greedy", "sampled"] = "greedy"
    """Accuracy of the greedy episode of each problem, or the mean over `evaluation.samples` sampled ones. That mean is
    what PPO raises, and it depends less on luck: a small update changes many greedy answers."""
    target: Name = "held-out"
    """On this set the challenger must be better: the whole interval of the difference lies above `least_gain`, and
    McNemar's p (of sampled episodes a permutation test's) is 0.05 at most; not asked where `least_gain` is negative."""
    least_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """0 asks for any gain that is certain."""
    guarded: list[Name] | None = None
    """On these sets it must not be worse; empty: on all."""
    margin: Share = 0.05
    """The whole interval of the difference lies above minus this. Small sets have wide intervals: about
    ±0.06 with 200 problems, ±0.03 with 1,000."""
    max_failed_verdicts: Share = 0.02
    """Alarm: a larger share of the verdicts in training are timeouts or errors."""
    max_kl: PositiveFloat = 1.0
    """Alarm: the challenger's sampled tokens are further from the champion, in nats a token."""
    max_length_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Alarm: its answers are so many times longer."""
    max_truncated_gain: Share = 0.1
    """Alarm: the share of episodes that a token limit cut rose by more."""
    hacking_gain: Share = 0.02
    """Alarm: success on what was trained on rose by more than this, while the accuracy on the target fell by more."""


class Retrain(Knobs):
    """Scheduled retraining: `run.name` names the series, its nights are the runs `<name>-0001`, `<name>-0002` …"""

    champion: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = "champion"
    """Alias of the promoted policy. Where there is none yet, `policy` becomes the first champion."""
    min_new: PositiveInt = 1
    """Fewer new problems than these wait for more."""
    replay: Decay = 0.5
    """Share of a night's problems that nights before were promoted with; keeps the policy from forgetting them."""
    gate: Gate = Gate()
    """Challenger against champion."""


class Config(Knobs):
    """One run, resolved."""

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
    def _possible(self) -> Self:
        sampling, rollout = self.sampling, self.rollout
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy and cannot be trained on: use 1.0")
        warm_start = self.policy.warm_start
        if warm_start and not warm_start.teaches and self.problems.train.kind != "arithmetic":
            raise ValueError(
                f"policy.warm_start teaches arithmetic, but problems.train.kind={self.problems.train.kind!r}: "
                "give policy.path, or policy.warm_start.teaches={kind: arithmetic}"
            )
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
            raise ValueError("inference.swap=restart needs servers of our own, but inference.urls is set: use reload")
        self._groups_possible()
        self._staleness_possible()
        self._gate_possible()
        return self

    def _gate_possible(self) -> None:
        sets, gate = [HELD_OUT, *self.evaluation.sets], self.retrain.gate
        for knob, names in (("target", [gate.target]), ("guarded", gate.guarded or [])):
            if strange := [name for name in names if name not in sets]:
                raise ValueError(
                    f"retrain.gate.{knob}={strange[0]!r} is no evaluation set; there are {', '.join(sets)}"
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
                f"{rollout.success_rate_ub:g}: no group could stay"
            )
        if self.reward.overlong_tokens >= limit:
            raise ValueError(
                f"reward.overlong_tokens={self.reward.overlong_tokens} must be below sampling.max_new_tokens={limit}"
            )

    def _staleness_possible(self) -> None:
        rollout, oldest = self.rollout, self.rollout.max_head_offpolicyness
        if self.run.overlap and oldest < 1:
            raise ValueError(
                "run.overlap trains on trajectories of the policy before: set rollout.max_head_offpolicyness=1 or more"
            )
        if self.run.overlap and self.inference.swap == "restart":
            raise ValueError("run.overlap keeps requests over a swap of weights: inference.swap=restart loses them")
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
