"""The weights of mixtures of experts, which have other names in files than in memory.

In memory a layer's experts are one parameter, so that one product computes them. Files name each expert, and vLLM and
transformers read them so. Transformers keeps the list of such models, and how their parameters are put together.

Example of Qwen3-MoE with E experts, of hidden size H and intermediate size I:

    in memory                         in files
    mlp.experts.gate_up_proj [E 2I H] mlp.experts.0.gate_proj.weight [I H], mlp.experts.0.up_proj.weight [I H], 1 …
    mlp.experts.down_proj    [E H I]  mlp.experts.0.down_proj.weight [H I], 1 …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from tasks.train.sharding import StoredTensors

_EXPERT = "*"
"""The place of an expert's number in a pattern of names."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """A kind of parameter [E, …] that is made of each expert's tensors, which follow each other in its rows."""

    parameter: str  # the end of its name
    patterns: Sequence[str]  # the ends of the names of an expert's tensors

    def names(self, parameter: str, expert: int) -> list[str]:
        """Return the names of one expert's tensors in files."""
        begin = parameter.removesuffix(self.parameter)
        return [begin + pattern.replace(_EXPERT, str(expert)) for pattern in self.patterns]


class FileNames:
    """The tensors in files that hold the parameters of a model: the same, but for fused experts.

    Args:
        model: the model, which may be empty or sharded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._fused = [
            _Fused(rule.target_patterns[0], rule.source_patterns)
            for rule in get_model_conversion_mapping(model, add_legacy=False)
            if isinstance(rule, WeightConverter) and _stacks_experts(rule)
        ]

    def split(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors in files that hold a parameter, by name; parts of it are copied."""
        fused = self._find(name)
        if fused is None:
            return {name: value}
        parts = value.chunk(len(fused.patterns), 1)
        return {
            of_file: part[expert].clone()
            for expert in range(len(value))
            for of_file, part in zip(fused.names(name, expert), parts, strict=True)
        }

    def rows(self, stored: StoredTensors, name: str, start: int, end: int) -> Tensor:
        """Read the rows start:end of a parameter; those of fused experts are whole experts."""
        fused = self._find(name)
        if fused is None:
            return stored.rows(name, start, end)
        experts = range(start, end) or range(1)  # at least one, for the shape
        read = [torch.cat([stored.read(each) for each in fused.names(name, expert)]) for expert in experts]
        return torch.stack(read)[: end - start]

    def _find(self, name: str) -> _Fused | None:
        return next((fused for fused in self._fused if name.endswith(fused.parameter)), None)


def _stacks_experts(rule: WeightConverter) -> bool:
    """Return whether a rule of transformers puts experts together as above: their rows, then the experts."""
    kinds = [type(step) for step in rule.operations]
    dimensions = [step.dim for step in rule.operations if isinstance(step, MergeModulelist | Concatenate)]
    whole = dimensions == [0, 1][: len(kinds)] and kinds == [MergeModulelist, Concatenate][: len(kinds)]
    return whole and all(_EXPERT in pattern for pattern in rule.source_patterns)
