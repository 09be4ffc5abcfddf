"""The sizes of a model as its config.json says them, and the numbers of parameters that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

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
