"""The types of an agent's requests to an engine and of the answers, and the seeds of what is drawn."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from configs.knobs import Temperature


class InferenceError(RuntimeError):
    """The engine cannot serve a request or a policy; the message says what to do."""


class EngineClosedError(InferenceError):
    """The flow of the engine is ending; the engine itself has no fault."""


class RefusedError(InferenceError):
    """The server refuses this request, such as one that is too long, and would take others."""


class NoSuchModelError(InferenceError):
    """The server has no adapter of this name, or does not know this address."""


class AbortedError(RuntimeError):
    """The engine aborted a request, as it does when it shuts down; a retry may succeed."""


class ContextLengthError(ValueError):
    """A prompt leaves no room in the model's context."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling parameters of one request (`gconfig`).

    An agent may name tokens that end a completion, such as the token of a tool call. The collector adds the tokens that
    end a turn in the chat template to every request.

    Raises:
        ValueError: vLLM would refuse the parameters, or sample with another temperature.
    """

    n: Annotated[int, Field(ge=1)] = 1
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    stop_token_ids: tuple[int, ...] = ()  # if sampled, it is returned like other tokens, as the last one
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # end a completion; their tokens are returned, too
    seed: int | None = None  # the agent's own; episodes with the same number still differ
    json_schema: str = ""  # JSON of a schema: only tokens that it allows are sampled, and the logprobs are among these

    def __post_init__(self) -> None:
        try:
            _CHECKED(**{name: getattr(self, name) for name in _fields})
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            place = ".".join(map(str, detail["loc"]))
            raise ValueError(f"gconfig.{place}={detail['input']!r:.80}: {detail['msg']}") from None


_fields: dict[str, Any] = {
    name: (kind, ...) for name, kind in get_type_hints(GenerationConfig, include_extras=True).items()
}
_CHECKED = create_model("GenerationConfig", __config__=ConfigDict(strict=True), **_fields)
"""Checks the values of a `GenerationConfig`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion of N tokens.

    Example: Completion(token_ids=[7, 2], logprobs=[-0.1, -0.3], versions=[3, 3], finish_reason="stop", limit=16)
    """

    token_ids: list[int]  # N
    logprobs: list[float]  # N, in the distribution that was sampled from
    versions: list[int]  # N, policy version that sampled each token
    finish_reason: str  # stop | length
    limit: int | None = None  # its most tokens, by request, context and time; None: the engine does not say
    experts: bytes = b""  # of prompt and completion, without the last token (`pack_experts`); empty: not asked for


@dataclass(frozen=True, slots=True)
class BundledGenerationOutputs:
    """The answer to one observation: `n` completions of the prompt."""

    qid: str
    prompt_ids: list[int]
    completions: list[Completion]  # n
    seeds: list[int]  # n
    latency_s: float

    @property
    def output_ids(self) -> list[list[int]]:
        """The token ids of each completion."""
        return [completion.token_ids for completion in self.completions]


Observation = tuple[str, list[int], GenerationConfig]
"""(qid, token ids, gconfig), which agents put on the observation queue."""


class Generator(Protocol):
    """What the collector needs of an engine; a test can fake it in ten lines."""

    @property
    def replicas(self) -> int: ...

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """Return `gconfig.n` completions; completion i is sampled with seed + i."""


def derive(*parts: int | str) -> int:
    """Return a 31-bit seed that follows from `parts`: the run's seed and its use, such as iteration and problem."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
