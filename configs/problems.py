"""The knobs of problems: where they come from, how often each is drawn, and which are left out."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from configs.knobs import URI, Knobs, Share
from configs.safety import brief

Column = Literal["id", "prompt", "solutions", "source", "metadata"]


Fields = dict[Column, str | list[str]]


MOST_PAIRS = 10**8
"""Largest number of pairs of operands; all pairs are listed before some are drawn."""


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


class WordProblemSource(Knobs):
    """Generated word problems of one step, such as `Anna has 23 apples and gets 14 more. How many …?`"""

    kind: Literal["word-problems"]
    split: Literal["train", "held-out"] = "train"
    """Split to generate. The held-out problems have other sentences, people and things than those of training."""
    low: PositiveInt = 10
    """Smallest number in a problem. Numbers of one digit, of two … are drawn equally often."""
    high: PositiveInt = 99
    """Largest number in a problem; the solution of a sum may be larger."""
    operators: Annotated[list[Literal["+", "-"]], Field(min_length=1)] = ["+", "-"]
    """Operators to draw from."""
    count: Annotated[int, Field(gt=0, le=10**6)] = 4000
    """Number of problems."""
    seed: int = 0
    """Seed of the draws."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high={self.high} is below low={self.low}: set high to {self.low} or more")
        return self


class RowSource(Knobs):
    """Rows of a data set, which a preset or your own mapping makes problems."""

    preset: Literal["gsm8k", "math", "areal", "verifiers", "verl"] | None = None
    """Name of a known data set, whose field mapping is used; or give `fields`."""
    fields: Fields = {}
    """Your own mapping: the column of the prompt and, if you like, of the solution(s), the id and the source. The
    problem keeps those of `metadata`, a list, which agent, environment and scorer see. `reward_model.ground_truth` is a
    column inside of another. A prompt may be messages; a row may lack columns of `metadata`. Problems that nothing
    compares with solutions, such as games, need none."""
    count: PositiveInt | None = None
    """Take only so many rows, the first ones; empty: all."""

    @model_validator(mode="after")
    def _mapping(self) -> Self:
        fields = self.fields
        if bool(self.preset) == bool(fields):
            presets = "gsm8k, math, areal, verifiers, verl"
            raise ValueError(f"give either preset ({presets}) or fields (prompt, solutions …), not both")
        if fields and "prompt" not in fields:
            raise ValueError(f"fields={fields} must name the column of prompt and, unless they have none, of solutions")
        for name, columns in fields.items():
            if isinstance(columns, list) and name != "metadata":
                raise ValueError(f"fields.{name}={columns}: only metadata has a list of columns; name one")
        return self


class FileSource(RowSource):
    """Rows of a JSONL or Parquet file."""

    kind: Literal["jsonl", "parquet"]
    path: URI
    """Path or URI of the file, or a pattern for several (`new/*.jsonl`); ids then begin with the name of the file."""


class HubSource(RowSource):
    """A Hugging Face data set by name."""

    kind: Literal["hub"]
    name: str
    """Name of the data set, such as `openai/gsm8k`, or a local folder with a data set."""
    subset: str | None = None
    """Configuration of the data set (Hugging Face's term), such as `main`."""
    split: str = "train"
    """Split of the data set."""


class StoredSource(Knobs):
    """A problem set that is already in the store."""

    kind: Literal["stored"]
    version: Annotated[str, Field(pattern=r"^problems/[0-9a-f]+$")]
    """Version of the problem set, such as `problems/1f0c4a7be23d5566`."""


Source = Annotated[
    ArithmeticSource | WordProblemSource | FileSource | HubSource | StoredSource, Field(discriminator="kind")
]


class ProblemSampling(Knobs):
    """The frequency with which a run draws each problem, by its results in earlier runs (`python -m flows.history`)."""

    prefer: Literal["all", "middle"] = "all"
    """`all` draws every problem once before any repeats; `middle` draws problems more often that are neither always nor
    never solved."""
    retire_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out problems whose success rate is at least this; 0.95 is usual; empty: leave out none for this reason."""
    leave_out_suspects: bool = False
    """Leave out problems that were never solved, because their gold answers may be wrong."""

    @property
    def active(self) -> bool:
        return self.prefer != "all" or self.retire_at is not None or self.leave_out_suspects


class Problems(Knobs):
    train: Source
    """Problems that the policy is trained on."""
    held_out: Source
    """Problems that the policy is evaluated on."""
    sampling: ProblemSampling = ProblemSampling()
    """Knobs of how often each problem of `train` is drawn."""
    exclusions: list[Annotated[str, Field(pattern=r"^exclusions/[0-9a-f]+$")]] = []
    """Versions (`exclusions/…`) of exclusions, made by `python -m tasks.provenance exclude`. Their trajectories enter
    no update, and their problems are not drawn. The list may change during a run. It does not affect the warm start."""
    max_bad_share: Share = 0.01
    """Bad rows are dropped and reported; a larger share of bad rows is an error."""
    without_room: Literal["leave-out", "refuse", "play"] = "leave-out"
    """Reaction to problems whose first prompt leaves less of `inference.max_model_len` than a sixteenth of
    `sampling.max_new_tokens`: name and never play them, stop before anything is played, or play them all the same."""
