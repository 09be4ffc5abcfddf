"""What agents ask of an engine and what they get back."""

from dataclasses import dataclass
from typing import Protocol

from configs.knobs import check_temperature


class InferenceError(RuntimeError):
    """The engine cannot serve what was asked; the message says what to do."""


class EngineClosedError(InferenceError):
    """The flow that the engine belongs to ends: nothing is wrong with the engine."""


class AbortedError(RuntimeError):
    """The engine gave a request up before its end, as it does when it shuts down: worth another try."""


class ContextLengthError(ValueError):
    """A prompt leaves no room in the model's context."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling parameters of one request (`gconfig`).

    An agent may name tokens that end a completion, such as that of a tool call; the tokens that end a turn in the chat
    template are added to every request by the collector.

    Raises:
        ValueError: vLLM would refuse it, or sample with another temperature.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # sampled and returned like any other token, and the last one

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("max_new_tokens", 1), ("top_k", -1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"gconfig.{name}={value!r}: give a whole number, {least} or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"gconfig.top_p={self.top_p!r}: give a number above 0, at most 1")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"gconfig.stop_token_ids={self.stop_token_ids!r}: give a tuple of token ids")
        check_temperature(self.temperature)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion of N tokens.

    Example: Completion(token_ids=[7, 2], logprobs=[-0.1, -0.3], versions=[3, 3], finish_reason="stop")
    """

    token_ids: list[int]  # N
    logprobs: list[float]  # N, of the distribution sampled from
    versions: list[int]  # N, policy version that produced each token
    finish_reason: str  # stop | length


@dataclass(frozen=True, slots=True)
class BundledGenerationOutputs:
    """Answers to one observation: `n` completions of the prompt."""

    qid: str
    prompt_ids: list[int]
    completions: list[Completion]  # n
    seeds: list[int]  # n
    latency_s: float

    @property
    def output_ids(self) -> list[list[int]]:
        """Token ids of each completion."""
        return [completion.token_ids for completion in self.completions]


Observation = tuple[str, list[int], GenerationConfig]
"""(qid, token ids, gconfig), as agents put it on the observation queue."""


class Generator(Protocol):
    """What the collector needs of an engine; a test fakes it in ten lines."""

    @property
    def replicas(self) -> int: ...

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """`gconfig.n` completions; completion i is sampled with seed + i."""
        ...
