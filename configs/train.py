"""The knobs of an update: how it is computed, its optimizer, its data, and where the ranks of the trainer run."""

from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, PositiveFloat, PositiveInt, model_validator

from configs.knobs import Decay, Knobs, NonNegativeFloat, NonNegativeInt, Share, Workers, refuse_idle

FROM_NEXT_UPDATE = (
    *("optimizer.lr", "optimizer.max_grad_norm", "algorithm.critic.lr", "algorithm.c_clip"),
    *("algorithm.early_stop_imp_ratio", "algorithm.behaviour_weight.cap", "algorithm.advantage.bound"),
)
"""Knobs that a run may change from its next update on: learning rates, and bounds of what a single token, episode or
minibatch may do. They have no state, and data that are stored already mean the same with another value."""


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


class Train(Knobs):
    """Knobs of the computation of updates, whatever their algorithm, and of the trainer's ranks."""

    epochs: PositiveInt = 1
    """Number of passes of an update over its data (sample reuse)."""
    minibatches: PositiveInt = 4
    """Number of optimizer steps in an epoch, each on a random share of the groups."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest number of tokens in one forward pass, padding included. Empty: a number for the device
    (`tasks/train/batches.py`)."""
    mask_truncated: bool = False
    """Exclude turns that the token limit cut from the loss."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token, which are stored with it. Needs
    servers that return them: on a GPU, since the CPU build has no such part."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Number format of the forward pass; weights and optimizer stay float32. Of Llama, Qwen2 and Qwen3 the output layer
    computes in float32 from rounded factors: to bfloat16 on a CPU, to TF32 on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    threads: Workers = 2
    """Number of CPU threads of the trainer; of each rank if there are several."""
    parallel: Parallel = Parallel()
    """The mesh of the trainer's ranks. More than one run in Ray: of this host alone, or of
    `cluster.address`."""
    state_every: PositiveInt = 1
    """Keep the train state (optimizer, critic, RNG), two thirds of a checkpoint's bytes, of every so many checkpoints
    and of the last one only. A run that continues at another one makes the state again from the stored data, bit for
    bit on the same machine; a fork begins at one that has it."""
    on_cluster: bool = False
    """Run a trainer of one rank on the cluster (`cluster.address`), too, and not in the flow's process. Several ranks
    (`train.parallel`), and the trainer of a stream (`run.overlap`), are always processes of their own in Ray."""
    timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait of a rank for the others, for example until those of its node have fetched a checkpoint. After it,
    all ranks end: one of them hangs, or a node is unreachable."""
    startup_timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait in each step of starting the ranks."""


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
    shorten all steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rates, of policy and critic, over the `run.iterations` updates of the run. A run that is
    lengthened later follows the longer schedule from its next update on."""
    decay_to: Share = 0.0
    """Fraction of the learning rates that the decay ends at."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises from zero. It is not a share of all steps, because
    `run.iterations` may be raised later."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schedule == "constant":
            refuse_idle(self, "decay_to", why="with schedule=constant")
        return self


class Fit(Knobs):
    """Training from stored data sets alone (`python -m flows.fit`)."""

    data: Annotated[list[str], Field(max_length=100_000)] = []
    """Runs, all of whose data sets are trained on, and versions of trajectories; `--data` sets it. A run keeps the
    versions that there were when it began."""
    scores: Annotated[list[str], Field(max_length=100_000)] = []
    """Versions of scores, at most one for each data set, if they shall not be those of this configuration's scorer. A
    run keeps those that it began with."""
    where: str | None = None
    """SQL condition (DuckDB) on the columns of `episodes` in `tasks/tables/tables.sql`, such as `best > 0.5`: one
    expression without queries, which reaches neither files nor the network; empty: all trajectories."""
    epochs: PositiveInt = 1
    """Number of passes over the data sets."""
    episodes_per_update: PositiveInt = 512
    """Number of trajectories of an update, up to the end of a group."""
