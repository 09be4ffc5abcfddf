"""The scorers by name, and those of a configuration: which one grades the problems of which source.

Add one with `register_scorer("name", Class)`, or configure a user's function as `package.module:function`:

    def score(answer: Answer, *, bonus: float = 0.1) -> Verdict:
        right = answer.text.strip() == answer.metadata["gold"]
        return Verdict("correct" if right else "wrong", reward=right + bonus, parts={"bonus": bonus})

It runs in the verifier's workers, under their limits. One that only decides may return True or False, or 1 or 0.
Metadata that no agent may see are named in an attribute of the function, below it: `score.private = ["gold"]`.
"""

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self, get_args

import numpy as np

from configs.knobs import nearest
from configs.models import Role
from configs.score import BY_MODEL
from configs.score import Score as ScoreSettings
from storage.grouping import grouped
from storage.records import Trajectory, VerdictName
from storage.visible import described
from tasks.problems.sources import UseOfSolutions
from tasks.registry import Registry, fingerprint
from tasks.score.by_model import JudgeScorer, RewardModelScorer
from tasks.score.code import CodeScorer, sandboxed
from tasks.score.verdict import COLUMNS, LIMIT_MET, Annotations, Answer, RunProgram, Scorer, Verdict, checked, storable
from tasks.score.verifier import MEMORY_MB, ScorerContext, Verifier, VerifierBrokenError
from tasks.tools.sandbox import check_host

NO_MODELS: Mapping[Role, str] = {}
OWN_COLUMNS = ("problem_id", "status", "prompt", "solutions", "metadata", "calls", "follows", "reward_parts")
_NAMES: tuple[VerdictName, ...] = get_args(VerdictName)
_PART = "correct"
SAID = {
    "timeout": f"{LIMIT_MET} the time that the environment gives",
    "error": "the environment said so while playing",
}
"""The reasons of an environment's verdicts."""


class MathVerifyScorer:
    """A turn is right if its final answer is one of the solutions, for the verifier."""

    columns: Sequence[str] = ("solutions", "answers")
    version = 4  # of the contract

    def __init__(self, context: ScorerContext) -> None:
        self._verifier = context.verifier

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._verifier.grade([(answer.given, answer.row["solutions"]) for answer in answers])


@dataclass(frozen=True, slots=True)
class SuccessRule:
    """The rule by which a turn is right, given what environment or agent said while playing.

    >>> SuccessRule().verdict("wrong", 1.0, {}), SuccessRule().verdict("", 0.2, {"correct": 0.0, "format": 0.2})
    ('wrong', 'wrong')
    """

    success_above: float = 0.0  # a turn without a verdict and without a part `correct` is right above this reward

    @classmethod
    def while_playing(cls, settings: ScoreSettings) -> Self:
        """Return the rule for filters and progress, before any scorer has given a verdict."""
        return cls(success_above=as_stored(settings.args.get("environment", {}).get("success_above", 0.0)))

    def verdict(self, stored: str, reward: float, parts: Mapping[str, float]) -> VerdictName:
        """Return `stored` if it is a verdict; otherwise decide by the part `correct`, or else by the reward."""
        if known := next((name for name in _NAMES if name == stored), None):
            return known
        right = parts[_PART] > 0.5 if _PART in parts else reward > self.success_above
        return "correct" if right else "wrong"

    def of(self, row: Trajectory, turn: int) -> VerdictName:
        """Return the verdict on a turn of a trajectory."""
        parts = row.reward_parts[turn] if row.reward_parts else {}
        return self.verdict(row.turns[turn].verdict, row.turns[turn].reward, parts)


class EnvironmentScorer:
    """A turn has the environment's reward with its parts, and is right by the `SuccessRule`.

    Args:
        context: what all scorers get.
        success_above: a turn without a verdict, and without a part `correct`, is right if its reward is above it.
    """

    columns: Sequence[str] = ("reward_parts",)
    version = 1

    def __init__(self, context: ScorerContext, *, success_above: float = 0.0) -> None:
        self._rule = SuccessRule(as_stored(success_above))

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        verdicts = []
        for answer in answers:
            turn, columns = answer.row["turns"][answer.turn], answer.row["reward_parts"]
            parts = dict(columns[answer.turn]) if columns else {}
            name = self._rule.verdict(turn["verdict"], turn["reward"], parts)
            verdicts.append(Verdict(name, reason=SAID.get(name, ""), reward=turn["reward"], parts=parts))
        return verdicts


def as_stored(number: float) -> float:
    """Round a number as rewards are stored."""
    return float(np.float32(number))


class OwnScorer:
    """A scorer that calls the user's function `name` (`package.module:function`) with an answer and `args`."""

    columns: Sequence[str] = OWN_COLUMNS
    version = 1

    def __init__(self, context: ScorerContext, name: str, args: Mapping[str, Any]) -> None:
        self._verifier, self._name, self._args = context.verifier, name, dict(args)

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._verifier.call(self._name, [(answer, self._args) for answer in answers])


SCORERS: Registry[Scorer] = Registry("score", own="function")
register_scorer = SCORERS.register

register_scorer("math-verify", MathVerifyScorer)
register_scorer("environment", EnvironmentScorer)
register_scorer("code", CodeScorer)
register_scorer("judge", JudgeScorer)
register_scorer("reward-model", RewardModelScorer)


def check_scorers(settings: ScoreSettings) -> None:
    """Check that every scorer of a configuration exists and takes its arguments.

    Raises:
        ValueError: a name or an argument is wrong, `score.args` are those of a scorer that is not used, or this machine
            cannot make the sandboxes that a scorer needs.
    """
    used = set(settings.by_source.values())
    if "code" in used:
        check_host()
    if settings.group and not any(":" in name or name == "judge" for name in used):
        raise ValueError(f"score.group has no effect: {', '.join(sorted(used))} judge each answer by itself")
    for name in sorted(used):
        if name.startswith("__main__:"):
            why = "the processes that grade do not run your script, and no fingerprint has its code"
            raise ValueError(f"score.type={name!r}: {why}: put the function into a module of its own")
        SCORERS.check_arguments(name, settings.args.get(name, {}), f"score.args.{name}")
        if name in BY_MODEL:
            SCORERS.make(name, None, settings.args.get(name, {}))
        found: Any = SCORERS.find(name)
        if ":" in name and (inspect.iscoroutinefunction(found) or not inspect.signature(found).parameters):
            raise ValueError(f"score.type={name!r}: give a function that is not async and takes an answer first")
        private = getattr(found, "private", ())
        if isinstance(private, str) or not all(isinstance(key, str) for key in private):
            given = f"its attribute private is {private!r}"
            raise ValueError(f"score.type={name!r}: {given}: give a list of metadata's keys")
    for name in sorted(settings.args.keys() - used):
        remedy = f"{nearest(name, used)}; score.type names {', '.join(sorted(used))}"
        raise ValueError(f"score.args.{name}: no problem has this scorer{remedy}")


def private_metadata(settings: ScoreSettings) -> Set[str]:
    """Return the keys of metadata that a scorer of a configuration calls private: agents do not get them."""
    return {key for name in settings.by_source.values() for key in getattr(SCORERS.find(name), "private", ())}


def use_of_solutions(settings: ScoreSettings, source: str) -> UseOfSolutions:
    """Return what the scorer of a source of problems does with solutions. One's own function may read them."""
    name = settings.of(source)
    if ":" in name or name == "judge":
        return "may read"
    return "needs" if "solutions" in getattr(SCORERS.find(name), "columns", ()) else "ignores"


def identity(settings: ScoreSettings, models: Mapping[Role, str] = NO_MODELS) -> dict[str, Any]:
    """Return what verdicts depend on besides math-verify and its limits.

    One's own function is identified by the fingerprint of its code (`tasks.registry`), a model by `models`.
    """
    names = sorted(set(settings.by_source.values()))
    # Older programs had other readings and rules: scores have a name that tells them apart.
    named = {"reading": "answer"} if "math-verify" in names else {}
    if names == ["math-verify"]:
        return {**named, "version": MathVerifyScorer.version}
    versions = {name: fingerprint(name) if ":" in name else SCORERS.find(name).version for name in names}
    rule = {"success": "said"} if "environment" in names else {}
    more: dict[str, Any] = {"group": True} if settings.group else {}
    if asked := {role: models[role] for role in settings.models}:
        more |= {"models": asked}
    return {"type": settings.by_source, "args": settings.args, "scorers": versions, **named, **rule, **more}


class Scorers:
    """The scorers of a configuration.

    Args:
        settings: names the scorers.
        verifier: the processes of math-verify and of users' functions.
        run_program: runs programs for the scorer `code`; default: in sandboxes.
        annotations: what models beside the policy said about the turns.
    """

    def __init__(
        self,
        settings: ScoreSettings,
        verifier: Verifier,
        run_program: RunProgram | None = None,
        annotations: Mapping[Role, Annotations] | None = None,
    ) -> None:
        programs = run_program or sandboxed(settings.timeout_s, MEMORY_MB)
        context = ScorerContext(verifier, programs, annotations or {})
        self._scorer_of, self.by_group, self.pays_last = settings.of, settings.group, settings.pays_last
        self._scorers: dict[str, Scorer] = {}
        for name in set(settings.by_source.values()):
            args = settings.args.get(name, {})
            self._scorers[name] = OwnScorer(context, name, args) if ":" in name else SCORERS.make(name, context, args)
        own = {column for scorer in self._scorers.values() for column in scorer.columns}
        self.columns = [*COLUMNS, *sorted(own - set(COLUMNS))]
        """The columns of trajectories that they read."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """Return the verdicts on `answers`, in order, each from the scorer of its problem's source."""
        positions = grouped((self._scorer_of(answer.row["source"]), number) for number, answer in enumerate(answers))
        verdicts: dict[int, Verdict] = {}
        for name, own in positions.items():
            judged = _judge(self._scorers[name], [answers[position] for position in own])
            verdicts.update(zip(own, judged, strict=True))
        return [checked(verdicts[position]) for position in range(len(answers))]


def _judge(scorer: Scorer, answers: Sequence[Answer]) -> list[Verdict]:
    """Let a scorer grade all answers at once or, if it raises, one by one, so that each error costs one turn."""
    try:
        return scorer.judge(answers)
    except VerifierBrokenError:
        raise
    except Exception as error:  # noqa: BLE001 - the verdict has the reason; too many of them stop the stage
        if len(answers) == 1:
            return [Verdict("error", reason=storable(described(error)))]
    return [verdict for answer in answers for verdict in _judge(scorer, [answer])]
