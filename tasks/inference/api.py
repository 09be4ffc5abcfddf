"""The types of an agent's requests to an engine and of the answers, how vLLM's answers are read, and seeds of draws."""

import hashlib
from base64 import b64decode
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from configs.inference import RETURN_EXPERTS
from configs.knobs import Temperature
from storage.records import pack_experts, unpack_experts

_LARGEST_NUMBER = 3e38  # annotations are stored as float32


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


def number(value: Any) -> float:
    if isinstance(value, bool) or not abs(value) < _LARGEST_NUMBER:
        raise ValueError(f"{value!r:.80} is no number that can be stored")
    return float(value)


def completion_of(choice: dict[str, Any], limit: int, experts: bytes) -> Completion:
    ids, versions = choice["token_ids"], list[int]()
    spans = [(int(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"]]
    if not all(type(value) is int and 0 <= value < 2**31 for value in (*ids, *(length for _, length in spans))):
        raise TypeError("a token, or the length of a span, is no number of 31 bits")
    if not len(choice["logprobs"]["content"]) == sum(length for _, length in spans) == len(ids) <= limit:
        raise ValueError(f"{len(ids)} tokens, of {limit}, and other numbers of logprobs or versions")
    for version, length in spans:
        versions += [version] * length
    return Completion(
        token_ids=ids,
        logprobs=[number(entry["logprob"]) for entry in choice["logprobs"]["content"]],
        versions=versions,
        finish_reason=choice["finish_reason"],
        limit=len(choice["token_ids"]) if choice["finish_reason"] == "length" else limit,
        experts=experts,
    )


def experts_of(choice: dict[str, Any], prompt: int, *, cut: bool = False) -> bytes:
    """Return the experts of a choice of a server's answer, as `storage.records.pack_experts` packs them.

    With `--enable-return-routed-experts` a choice has those of all tokens that were read: base64 of a file in NumPy's
    format .npy, [prompt + completion - 1, layers, experts per token]. The last token was not read. vLLM demands its
    Model Runner V2 and prefix caching for it.

    Args:
        choice: an entry of `choices`.
        prompt: number of tokens of the prompt.
        cut: the completion was cut, so the experts of its last tokens may be missing.

    Raises:
        InferenceError: it has none.
        ValueError: they cannot be read, or do not belong to its tokens.
    """
    if (encoded := choice.get("routed_experts")) is None:
        raise InferenceError(
            "a server answered without the experts that it chose, which train.routing_replay=true needs: start it with "
            f"{RETURN_EXPERTS} (and prefix caching, on a GPU), or leave the knob out"
        )
    experts = unpack_experts(b64decode(encoded, validate=True))
    missing = prompt + len(choice["token_ids"]) - 1 - len(experts)
    if missing < 0 or (missing and not cut):
        both = f"a prompt of {prompt} and a completion of {len(choice['token_ids'])}"
        raise ValueError(f"the experts of {len(experts)} tokens for {both}: expected one less than both")
    return pack_experts(experts)


def derive(*parts: int | str) -> int:
    """Return a 31-bit seed that follows from `parts`: the run's seed and its use, such as iteration and problem."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
