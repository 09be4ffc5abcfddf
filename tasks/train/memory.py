"""The memory of a rank of the trainer and of a vLLM server, computed from sizes and knobs; nothing is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from configs.algorithms import Algorithm
from configs.inference import Servers
from configs.policy import LoRA
from configs.train import Train

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose parameters can be counted: dense decoders with one gated MLP in each layer."""
CPU_TOKENS, GPU_TOKENS = 2048, 16384
"""Default of `train.micro_batch_tokens`. On a CPU 8192 and more were slower; 4096 was as fast, with more memory. The
number for a GPU was not measured. It is never chosen by time, because another cut into micro-batches changes the
last bits of the weights."""
BUCKET = 2**24
"""Numbers in a message of `Mesh.add_up`, unless a tensor has more."""
CHUNK_TOKENS = 4096
"""Number of action tokens whose logits over the whole vocabulary are in memory at one time."""


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
        kind, experts = config.get("model_type"), [key for key, value in config.items() if "expert" in key and value]
        if experts or kind not in SUPPORTED:
            what = f"a mixture of experts ({experts[0]})" if experts else "of another architecture"
            raise ValueError(
                f"model_type={kind!r} is {what}: only dense models of {', '.join(SUPPORTED)} can be counted"
            )
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

    def adapter_parameters(self, lora: LoRA) -> int:
        """The number of parameters of an adapter. Targets that are none of a dense decoder's layers are not counted."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        widths = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.intermediate),
        }
        return self.layers * lora.rank * sum(widths.get(target, 0) for target in lora.targets)

    @property
    def root_parameters(self) -> int:
        """The number of parameters outside of the layers: embedding, last norm, and output layer if it is not tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters


PUBLIC = {
    "Qwen/Qwen2.5-1.5B-Instruct": ModelSizes("qwen2", 1536, 28, 8960, 12, 2, 128, 151936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": ModelSizes("qwen2", 3584, 28, 18944, 28, 4, 128, 152064, tied=False),
    "Qwen/Qwen2.5-32B-Instruct": ModelSizes("qwen2", 5120, 64, 27648, 40, 8, 128, 152064, tied=False),
    "Qwen/Qwen2.5-72B-Instruct": ModelSizes("qwen2", 8192, 80, 29568, 64, 8, 128, 152064, tied=False),
}
"""The sizes of some public models by their hub names, so that they need no network."""


def memory_of(
    sizes: ModelSizes, train: Train, tokens: int, algorithm: Algorithm | None = None, lora: LoRA | None = None
) -> dict[str, int]:
    """Compute the bytes of one rank at the peak of an update, by what they hold.

    These do not reach their peaks at the same moment, so the sum is an upper bound of what is counted. Temporary
    tensors inside of one operation are not counted.

    Args:
        sizes: the sizes of the policy; a reference policy and a critic of its own have the same.
        train: the knobs, with the mesh.
        tokens: the largest number of tokens in a forward pass.
        algorithm: the knobs, with reference policy and critic; None: neither.
        lora: the knobs of the adapter, if only an adapter is trained; its own activations are not counted.
    """
    shard, parameters = train.parallel.shard, sizes.parameters
    root, layer = sizes.root_parameters, sizes.layer_parameters
    trained = sizes.adapter_parameters(lora) if lora else parameters
    reference = algorithm is not None and algorithm.keeps_reference and not lora
    critic = algorithm is not None and algorithm.critic is not None and algorithm.critic.model == "own"
    gathered = 0
    if shard > 1:
        # Of what is outside of the layers, FSDP holds the weights of each model and one gradient. Of the layers: the
        # weights of the one that computes and of the next one, the gradient of the last one, and a buffer for what
        # arrives and what leaves.
        gathered = 4 * ((2 + reference + critic) * root + 5 * layer)
    elif train.parallel.replicate > 1:  # copies join gradients before they send them
        gathered = 4 * min((1 + critic) * parameters, BUCKET + sizes.vocabulary * sizes.hidden)
    of_moments = 8 if train.moments == "device" else 0
    saved, all_layers = saved_by_layer(sizes, train.autocast), sizes.layers
    activations, casts = saved * all_layers, 2 * layer * all_layers
    if train.gradient_checkpointing:  # a hidden state for each layer, and one layer at a time as without it
        activations, casts = saved + 4 * sizes.hidden * all_layers, 2 * layer
    if train.kernels == "auto" and train.device != "cpu" and shard == 1:  # copies of all, which live through a step
        casts = 2 * layer * all_layers * (1 + reference + critic)
    return {
        "weights, float32": 4 * (parameters + (trained if lora else 0)) // shard,
        "gradients, float32": 4 * trained // shard,
        "moments of AdamW": of_moments * trained // shard,
        "reference policy, critic of its own": (4 * reference + (8 + of_moments) * critic) * parameters // shard,
        "what FSDP holds whole for a while": gathered,  # without shards, gradients in a message
        "bfloat16 casts of weights": casts if train.autocast == "bfloat16" else 0,
        "activations for the backward pass": activations * tokens,
        f"logits of {CHUNK_TOKENS:,} tokens": 4 * 4 * sizes.vocabulary * min(tokens, CHUNK_TOKENS),
    }


def served_memory(sizes: ModelSizes, inference: Servers) -> tuple[int, int]:
    """Compute what the fullest GPU of a vLLM server holds: the bytes of its weights, and those of each token.

    Its part of the model is a smaller model of the same width: some of the heads, of the columns of each MLP and of the
    vocabulary, and all norms. GPUs that are more than the heads for keys and values have copies of them. With several
    groups of layers the first one has the embedding and the last one the output layer.
    """
    tensor, pipeline = inference.tensor_parallel, inference.pipeline_parallel
    part = replace(
        sizes,
        layers=-(-sizes.layers // pipeline),
        intermediate=sizes.intermediate // tensor,
        heads=sizes.heads // tensor,
        kv_heads=max(1, sizes.kv_heads // tensor),
        vocabulary=-(-sizes.vocabulary // tensor),
        tied=sizes.tied or pipeline > 1,
    )
    number = 4 if inference.dtype == "float32" else 2
    return number * part.parameters, number * 2 * part.layers * part.kv_heads * part.head_size


def saved_by_layer(sizes: ModelSizes, autocast: Literal["none", "bfloat16"]) -> int:
    """Return the bytes that one layer saves of a token, if its attention keeps no matrix of all pairs of tokens.

    The factors add up what PyTorch saves for norms, linear layers and attention; a test compares the sum with it.
    """
    hidden, attention, middle = sizes.hidden, sizes.attention, sizes.intermediate
    norms = attention if sizes.model_type == "qwen3" else 0  # of queries and keys
    if autocast == "bfloat16":
        return 26 * hidden + 4 * attention + 8 * middle + 6 * norms
    return 24 * hidden + 8 * attention + 16 * middle + 8 * norms
