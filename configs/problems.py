"""The knobs of problems: where they come from, how often each is drawn, and which are left out."""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from configs.agent import Agent, Environment
from configs.knobs import URI, Knobs, Name, Share
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


class GuessSource(Knobs):
    """Games in which a number is to be guessed, for the environment `guess-number`. They have no solutions."""

    kind: Literal["guess-number"]
    split: Literal["train", "held-out"] = "train"
    """Split of the games, which differ by their seeds."""
    low: int = 1
    """Smallest number."""
    high: int = 7
    """Largest number."""
    count: Annotated[int, Field(gt=0, le=10**6)] = 200
    """Number of games."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high <= self.low:
            raise ValueError(f"high={self.high} must be above low={self.low}: there is nothing to guess")
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
    ArithmeticSource | WordProblemSource | GuessSource | FileSource | HubSource | StoredSource,
    Field(discriminator="kind"),
]


class ProblemSampling(Knobs):
    """The frequency with which a run draws each problem, by its results in earlier runs of the store."""

    prefer: Literal["all", "middle"] = "all"
    """`all` draws every problem once before any repeats, if none is retired; `middle` draws problems more often that
    are neither always nor never solved."""
    retire_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Problems whose success rate is at least this are drawn with a small weight, 0.05 where others have up to 1, so
    that a policy that forgets them meets them again; 0.95 is usual; empty: none."""
    leave_out_suspects: bool = False
    """Leave out problems that were never solved, because their gold answers may be wrong."""

    @property
    def active(self) -> bool:
        return self.prefer != "all" or self.retire_at is not None or self.leave_out_suspects


class Member(Knobs):
    """One source of a mixture. What it does not give is the run's: agent, environment, scorer and filters."""

    name: Name
    """Name that its problems have as their source, by which scorers, curves and evaluations tell them apart."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the problems drawn, relative to the other members: with weights 2, 1 and 1 every second problem is one
    of the first member."""
    source: Source
    """Problems that the policy is trained on."""
    held_out: Source | None = None
    """Problems that the policy is evaluated on, played and scored like those of training; empty: none of its own."""
    agent: Agent | None = None
    """The whole section `agent` for these problems, tools included; empty: the run's."""
    environment: Environment | None = None
    """The whole section `environment` for these problems; empty: the run's."""
    score: str | None = None
    """Scorer of these problems, which becomes `score.type.NAME`; empty: that of `score.type`."""
    success_rate_lb: Share | None = None
    """`rollout.success_rate_lb` for these problems; empty: the run's."""
    success_rate_ub: Share | None = None
    """`rollout.success_rate_ub` for these problems; empty: the run's."""
    reject_equal: bool | None = None
    """`rollout.reject_equal` for these problems; empty: the run's."""

    @property
    def filters(self) -> dict[str, Any]:
        """The knobs of `rollout` that it gives."""
        names = ("success_rate_lb", "success_rate_ub", "reject_equal")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def scorers_named(members: list[Any]) -> dict[str, str]:
    """Return the scorers that members name, by their names; of values that were not checked yet."""
    found = {}
    for member in members:
        match member:
            case {"name": str(name), "score": str(scorer)} if name != "default":  # which is refused
                found[name] = scorer
    return found


FORMS = ("source", "mixture")
"""The forms of `problems.train`, which pydantic names in the locations of errors."""
Training = Annotated[
    Annotated[Source, Tag("source")] | Annotated[list[Member], Field(min_length=1, max_length=100), Tag("mixture")],
    Discriminator(lambda value: FORMS[isinstance(value, list | tuple)]),
]


class NamedSource(NamedTuple):
    """A source of problems with the name of its member; without a name it is the only source, or the run's own."""

    source: Source
    name: str = ""  # of the member
    where: str = ""  # what messages begin with, such as "problems.train[1] (tools): "


class Problems(Knobs):
    train: Training
    """Problems that the policy is trained on: one source or a list of members, each with a name, a weight, a source
    and, if you like, an agent, an environment, a scorer, filters and held-out problems of its own. The weights share
    out the problems drawn, and the gradient too: each member's part is normalised by its spread and its number of
    tokens (`tasks/problems/README.md`)."""
    held_out: Source | None = None
    """Problems that the policy is evaluated on; in a mixture in addition to those of its members, or instead."""
    sampling: ProblemSampling = ProblemSampling()
    """Knobs of how often each problem of `train` is drawn."""
    exclusions: list[Annotated[str, Field(pattern=r"^exclusions/[0-9a-f]+$")]] = []
    """Versions (`exclusions/…`) of exclusions, made by `python -m tasks.provenance exclude`. Their trajectories enter
    no update, and their problems are not drawn. The list may change during a run."""
    max_bad_share: Share = 0.01
    """Bad rows are dropped and reported; a larger share of bad rows is an error."""

    @property
    def members(self) -> list[Member]:
        """The members of a mixture; none if `train` is one source."""
        return self.train if isinstance(self.train, list) else []

    @property
    def trained(self) -> "list[NamedSource]":
        """The parts of the training problems."""
        if not isinstance(self.train, list):
            return [NamedSource(self.train)]
        return [NamedSource(m.source, m.name, f"problems.train[{n}] ({m.name}): ") for n, m in enumerate(self.train)]

    @property
    def evaluated(self) -> "list[NamedSource]":
        """The parts of the held-out problems: those of members, then the run's."""
        both = zip(self.trained, self.members, strict=False)
        own = [part._replace(source=each.held_out) for part, each in both if each.held_out]
        return [*own, *([NamedSource(self.held_out)] if self.held_out else [])]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        names = [member.name for member in self.members]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"train names {twice!r} twice: give each member of the mixture a name of its own")
        if "default" in names:
            raise ValueError("train: 'default' stands for all other sources in score.type: choose another name")
        if not self.evaluated:
            where = ", here or in a member of the mixture" if names else ""
            raise ValueError(f"held_out must be given{where}: problems that the policy is evaluated on")
        return self
