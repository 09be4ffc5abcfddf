"""The memory of one rank of the trainer, computed from the sizes of the model and the mesh; nothing is measured.

python -m tasks.train.memory
python -m tasks.train.memory --tokens 4096 --gpus 64 128
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import product
from typing import Any, Literal, Self

from configs.train import PPO, Parallel
from storage import interrupts
from storage.commands.program import Parser, whole

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose parameters can be counted: dense decoders with one gated MLP in each layer."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a dense decoder.

    Example of Qwen2.5-1.5B: ModelSizes("qwen2", hidden=1536, layers=28, intermediate=8960, heads=12, kv_heads=2,
    head_size=128, vocabulary=151936, tied=True), 1.54 billion parameters
    """

    model_type: str
    hidden: int
    layers: int
    intermediate: int  # width of the MLP
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # embedding and output layer are one matrix

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the sizes from the values of a config.json.

        Raises:
            ValueError: the model is a mixture of experts or of an unknown type, or a size is missing.
        """
        _refuse_others(config)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            return cls(
                model_type=config["model_type"],
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                intermediate=int(config["intermediate_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or hidden // heads),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ValueError(f"config.json has no {error}: give the config.json of a transformers model") from None

    @property
    def attention(self) -> int:
        """The width of the queries and of the keys of one layer together."""
        return (self.heads + self.kv_heads) * self.head_size

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer. Optional biases (`attention_bias`, `mlp_bias`) are not counted."""
        matrices = 2 * self.hidden * self.attention + 3 * self.hidden * self.intermediate
        biases = self.attention + self.kv_heads * self.head_size if self.model_type == "qwen2" else 0
        norms = 2 * self.hidden + (2 * self.head_size if self.model_type == "qwen3" else 0)
        return matrices + biases + norms

    @property
    def root_parameters(self) -> int:
        """The number of parameters outside of the layers: embedding, last norm, and output layer if it is not tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters


def _refuse_others(config: Mapping[str, Any]) -> None:
    kind, experts = config.get("model_type"), [key for key, value in config.items() if "expert" in key and value]
    supported = f"only dense models of the types {', '.join(SUPPORTED)} are supported"
    if experts:
        raise ValueError(
            f"the model ({kind}) is a mixture of experts ({experts[0]}={config[experts[0]]!r}): {supported}"
        )
    if kind not in SUPPORTED:
        raise ValueError(f"the parameters of model_type={kind!r} cannot be counted: {supported}")


def _qwen25(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool = False
) -> ModelSizes:
    vocabulary = 151936 if tied else 152064
    return ModelSizes("qwen2", hidden, layers, intermediate, heads, kv_heads, 128, vocabulary, tied)


PUBLIC = {
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen25(1536, 28, 12, 2, 8960, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen25(3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-32B-Instruct": _qwen25(5120, 64, 40, 8, 27648),
    "Qwen/Qwen2.5-72B-Instruct": _qwen25(8192, 80, 64, 8, 29568),
}
"""The sizes of some public models by their hub names, so that they need no network."""


CARD = 80 * 10**9
"""Bytes of the cards in the table."""
USABLE = 0.9
"""Share of a card that the trainer may fill; the rest is for CUDA, NCCL, and gaps that are too small to use."""
CPU_TOKENS, GPU_TOKENS = 2048, 16384
"""Default of `ppo.micro_batch_tokens`. On a CPU 8192 and more were slower, and 4096 was about as fast with more memory.
The number for a GPU was not measured. It is never chosen by time, because another cut into micro-batches changes the
last bits of the weights."""
BUCKET = 2**24
"""Numbers in a message of `Mesh.add_up`, unless a tensor has more."""
CHUNK_TOKENS = 4096
"""Number of action tokens whose logits over the whole vocabulary are in memory at one time."""
_GB = 10**9
_PAPER = PPO(autocast="bfloat16", gradient_checkpointing=True)
"""The knobs of the table."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak of an update, by part.

    The parts do not reach their peaks at the same moment, so the total is an upper bound of what is counted. Temporary
    tensors inside of one operation are not counted.
    """

    weights: int  # float32
    gradients: int  # float32
    moments: int  # AdamW's two
    others: int  # reference policy and critic of its own
    gathered: int  # what FSDP holds whole for a while; without shards, gradients in a message
    casts: int  # bfloat16 casts of weights
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def fits(self) -> bool:
        """True if a card of 80 GB has room for the trainer alone."""
        return self.total <= USABLE * CARD


def memory_of(sizes: ModelSizes, ppo: PPO, tokens: int) -> Memory:
    """Compute the memory of one rank.

    Args:
        sizes: the sizes of the policy; a reference policy and a critic of its own have the same.
        ppo: the knobs, with the mesh.
        tokens: the largest number of tokens in a forward pass.
    """
    shard, parameters = ppo.parallel.shard, sizes.parameters
    reference, critic = ppo.kl.kl_ctl > 0, ppo.critic is not None and ppo.critic.model == "own"
    return Memory(
        weights=4 * parameters // shard,
        gradients=4 * parameters // shard,
        moments=8 * parameters // shard,
        others=(4 * reference + 16 * critic) * parameters // shard,
        gathered=_gathered(sizes, 1 + reference + critic) if shard > 1 else _bucket(sizes, ppo.parallel, 1 + critic),
        casts=_casts(sizes, ppo),
        activations=_activations(sizes, ppo) * tokens,
        logits=4 * 4 * sizes.vocabulary * min(tokens, CHUNK_TOKENS),
    )


def _gathered(sizes: ModelSizes, models: int) -> int:
    """Return the bytes that FSDP holds whole, in float32.

    What is outside of the layers: the weights of each model and one gradient. Of the layers: the weights of the one
    that computes and of the next one, the gradient of the last one, and a buffer for what arrives and what leaves.
    """
    return 4 * ((models + 1) * sizes.root_parameters + 5 * sizes.layer_parameters)


def _bucket(sizes: ModelSizes, parallel: Parallel, models: int) -> int:
    """Return the most bytes of the gradients that copies of the trained models send in one message, joined first."""
    largest = sizes.vocabulary * sizes.hidden
    return 4 * min(models * sizes.parameters, BUCKET + largest) if parallel.replicate > 1 else 0


def _casts(sizes: ModelSizes, ppo: PPO) -> int:
    """Return the bytes of the bfloat16 weights that autocast makes and the backward pass keeps.

    With gradient checkpointing only one layer has them at a time, provided that autocast's cache is off.
    """
    layers = 1 if ppo.gradient_checkpointing else sizes.layers
    return 2 * layers * sizes.layer_parameters if ppo.autocast == "bfloat16" else 0


def _activations(sizes: ModelSizes, ppo: PPO) -> int:
    """Return the bytes that a token leaves for the backward pass; with checkpointing, a hidden state for each layer."""
    saved = saved_by_layer(sizes, ppo.autocast)
    return saved + 4 * sizes.hidden * sizes.layers if ppo.gradient_checkpointing else saved * sizes.layers


def saved_by_layer(sizes: ModelSizes, autocast: Literal["none", "bfloat16"]) -> int:
    """Return the bytes that one layer saves of a token, if its attention keeps no matrix of all pairs of tokens.

    The factors add up what PyTorch saves for norms, linear layers and attention; a test compares the sum with it.
    """
    hidden, attention, middle = sizes.hidden, sizes.attention, sizes.intermediate
    norms = attention if sizes.model_type == "qwen3" else 0  # of queries and keys
    if autocast == "bfloat16":
        return 26 * hidden + 4 * attention + 8 * middle + 6 * norms
    return 24 * hidden + 8 * attention + 16 * middle + 8 * norms


def paper_table(gpus: Iterable[int], tokens: int) -> Iterator[str]:
    """Yield the lines of a Markdown table: public models on numbers of GPUs, each sharded over all of them."""
    parts = [field.name for field in fields(Memory) if field.name != "others"] + ["total"]
    yield f"| model | GPUs | {' | '.join(parts)} | fits |"
    yield "|---" * (len(parts) + 3) + "|"
    for (name, sizes), count in product(PUBLIC.items(), gpus):
        memory = memory_of(sizes, _PAPER.model_copy(update={"parallel": Parallel(shard=count)}), tokens)
        cells = [f"{getattr(memory, part) / _GB:.1f}" for part in parts]
        model = name.removeprefix("Qwen/").removesuffix("-Instruct")
        yield f"| {model} | {count} | {' | '.join(cells)} | {'yes' if memory.fits else 'no'} |"


def main() -> int:
    """Print the table that is in the README."""
    parser = Parser(prog="python -m tasks.train.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpus", type=whole(1), nargs="+", default=[8, 16, 64], help="numbers of GPUs; default 8 16 64"
    )
    parser.add_argument("--tokens", type=whole(1), default=8192, help="tokens in a forward pass; default 8192")
    arguments = parser.parse_args()
    print("\n".join(paper_table(arguments.gpus, arguments.tokens)))
    return 0


if __name__ == "__main__":
    interrupts.run(main)
