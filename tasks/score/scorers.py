"""The scorers by name, and those of a configuration: which one judges the problems of which source.

Add one with `register_scorer("name", Class)`, or configure a function as `package.module:function` (`own`).
"""

import hashlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from configs.score import Score as ScoreSettings
from storage.visible import described
from tasks.registry import Registry, nearest
from tasks.score.code import CodeScorer
from tasks.score.environment import EnvironmentScorer
from tasks.score.interface import COLUMNS, Answer, RunProgram, Scorer, ScorerContext
from tasks.score.math_verify import LIBRARY_VERSION, MathVerifyScorer
from tasks.score.own import OwnScorer
from tasks.score.programs import sandboxed
from tasks.score.verdict import Verdict, checked, storable
from tasks.score.verifier import MEMORY_MB, Verifier, VerifierBrokenError
from tasks.tools.sandbox import check_host

SCORERS: Registry[Scorer] = Registry("score", own="function")
register_scorer = SCORERS.register

register_scorer("math-verify", MathVerifyScorer)
register_scorer("environment", EnvironmentScorer)
register_scorer("code", CodeScorer)


def check_scorers(settings: ScoreSettings) -> None:
    """Check that every scorer of a configuration exists and takes its arguments.

    Raises:
        ValueError: a name or an argument is wrong, `score.args` are those of a scorer that is not used, or this machine
            cannot make the sandboxes that a scorer needs.
    """
    used = set(settings.by_source.values())
    if "code" in used:
        check_host()
    for name in sorted(used):
        SCORERS.check_arguments(name, settings.args.get(name, {}))
        if ":" in name:
            _check_function(name)
        _private(name)
    for name in settings.args:
        if name not in used:
            raise ValueError(
                f"score.args.{name}: no problem has this scorer{nearest(name, used)}; score.type names "
                f"{', '.join(sorted(used))}"
            )


def _check_function(name: str) -> None:
    function: Any = SCORERS.find(name)
    if inspect.iscoroutinefunction(function) or not inspect.signature(function).parameters:
        raise ValueError(f"score.type={name!r}: give a function that is not async and takes an answer first")


def private_metadata(settings: ScoreSettings) -> Set[str]:
    """Return the keys of metadata that a scorer of a configuration calls private: agents do not get them."""
    return {key for name in settings.by_source.values() for key in _private(name)}


def _private(name: str) -> Sequence[str]:
    keys = getattr(SCORERS.find(name), "private", ())
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"score.type={name!r}: its attribute private is {keys!r}: give a list of keys of metadata")
    return keys


def identity(settings: ScoreSettings) -> dict[str, Any]:
    """Return what verdicts depend on besides math-verify and its limits; empty if its own reading is all there is.

    One's own function is identified by the source of its module. If it depends on other modules, give it an argument
    that says which version of them it uses.
    """
    names = sorted(set(settings.by_source.values()))
    read = "math-verify" in names and settings.reading == "answer"
    named = {"reading": settings.reading} if read else {}
    if names == ["math-verify"]:
        return {**named, "version": MathVerifyScorer.version} if read else {}
    versions = {name: _source(name) if ":" in name else SCORERS.find(name).version for name in names}
    if "math-verify" in names and not read:
        versions["math-verify"] = LIBRARY_VERSION
    # Without the rule for parts, scores have the name that they had before there was one.
    rule = {"success": settings.success} if "environment" in names and settings.success != "reward" else {}
    return {"type": settings.by_source, "args": settings.args, "scorers": versions, **named, **rule}


def _source(name: str) -> str:
    SCORERS.find(name)  # imports the module
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    if not path:
        raise ValueError(f"score.type={name!r}: its module has no file, so its scores could not be told from others'")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Scorers:
    """The scorers of a configuration.

    Args:
        settings: names the scorers.
        verifier: the processes of math-verify and of users' functions.
        run_program: runs programs for the scorer `code`; default: in sandboxes.
    """

    def __init__(self, settings: ScoreSettings, verifier: Verifier, run_program: RunProgram | None = None) -> None:
        programs = run_program or sandboxed(settings.timeout_s, MEMORY_MB)
        context = ScorerContext(verifier, programs, settings.reading, by_part=settings.success == "said")
        self._by_source = settings.by_source
        self._scorers = {
            name: _make(name, context, settings.args.get(name, {})) for name in set(self._by_source.values())
        }
        own = {column for scorer in self._scorers.values() for column in scorer.columns}
        self.columns = [*COLUMNS, *sorted(own - set(COLUMNS))]
        """The columns of trajectories that they read."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """Return the verdicts on `answers`, in order, each from the scorer of its problem's source."""
        positions = defaultdict[str, list[int]](list)
        for position, answer in enumerate(answers):
            positions[self._by_source.get(answer.row["source"], self._by_source["default"])].append(position)
        verdicts: dict[int, Verdict] = {}
        for name, places in positions.items():
            judged = _judge(self._scorers[name], [answers[place] for place in places])
            verdicts.update(zip(places, judged, strict=True))
        return [checked(verdicts[position]) for position in range(len(answers))]


def _make(name: str, context: ScorerContext, args: Mapping[str, Any]) -> Scorer:
    return OwnScorer(context, name, args) if ":" in name else SCORERS.make(name, context, args)


def _judge(scorer: Scorer, answers: Sequence[Answer]) -> list[Verdict]:
    """Let a scorer judge all answers at once or, if it raises, one by one, so that each error costs one turn."""
    try:
        return scorer.judge(answers)
    except VerifierBrokenError:
        raise
    except Exception as error:  # noqa: BLE001 - the verdict has the reason; too many of them stop the stage
        if len(answers) == 1:
            return [Verdict("error", reason=storable(described(error)))]
    return [verdict for answer in answers for verdict in _judge(scorer, [answer])]
