"""The checks of the audit: what a check is given (`AuditEvidence`), what it returns (`Measured`), and their registry.

The files of this folder have the checks by subject. A check has the name of its knob in `configs/audit.py`, also in
reports. It notes its cases in the database (`views.sql`) and returns one value, which `tasks.audit.run` compares with
the knob's threshold. A check that is only rows of SQL and a sentence is declared in a file of SQL (`_declare`), which
calls the functions of `functions`; another one is a function below `check`.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from configs.audit import Audit, Checks
from storage import layout
from storage.grouping import grouped
from storage.logs.leases import is_held
from storage.objects.store import Store
from storage.versions import manifests
from tasks.audit.database import AuditDatabase
from tasks.audit.decoding import Decoder, find_decoder
from tasks.score.verifier import Verifier
from tasks.tables.sets import LACKED, DataSet, Intake, Unit


@dataclass(frozen=True)
class AuditEvidence:
    """The data that checks read, and the settings."""

    database: AuditDatabase
    store: Store
    cache: Path
    data_sets: list[DataSet]
    intake: Intake
    settings: Audit
    verifier: Verifier
    drifts: dict[str, float] = field(default_factory=dict)
    """The mean difference to recomputed logprobs, by version of the data set; `logprob_drift` fills it."""

    @cached_property
    def complete(self) -> list[int]:
        """The numbers of the data sets that were read completely, because a missing row means nothing in others.

        A data set without scores is left out while a run is still working on it, because its scores are yet to come.
        """

        def is_done(each: DataSet) -> bool:
            trained = layout.checkpoint(each.run, each.iteration + 1)
            is_over = each.is_evaluation or manifests.committed(self.store, trained)
            return is_over or is_held(self.store, each.run) is None

        readable = [each for each in self.data_sets if each.version not in self.intake.incomplete]
        return [each.number for each in readable if each.scores or is_done(each)]

    @cached_property
    def decoders(self) -> dict[int, Decoder]:
        """The decoders of data sets, by number, of whose run a checkpoint with a tokenizer is left."""
        rows = self.database.all("select run, policy, data_set from data_sets order by evaluation, iteration")
        policies = grouped((run, policy) for run, policy, _ in rows)
        found = {run: find_decoder(self.store, run, names, self.cache)[0] for run, names in policies.items()}
        return {number: decoder for run, _, number in rows if (decoder := found[run])}

    @cached_property
    def rows(self) -> int:
        """The number of trajectories that could be read."""
        return self.database.count("episodes")

    @cached_property
    def graded(self) -> set[int]:
        """The numbers of the data sets with a graded turn."""
        return set(self.database.integers("select distinct data_set from turns where verdict <> 'none'").tolist())

    def left_out(self, needs: str) -> tuple[list[DataSet], str]:
        """Return the data sets that lack something that a check needs, and the names of what they lack.

        Raises:
            SkippedError: there is no data set on which the check could run.
        """
        words = set(needs.split())
        if words != {"nothing"} and not self.rows:
            raise SkippedError("there is no row to check")
        if "scored" in words and not self.database.count("scores"):
            raise SkippedError("there is no score to check")
        if "calls" in words and not self.database.count("calls"):
            raise SkippedError("no turn calls a tool")
        wanted = words & _LACKED.keys()
        lacks = {each.number: wanted.intersection(each.lacks) for each in self.data_sets}
        for number in lacks.keys() - self.graded:
            lacks[number] |= wanted & {"scores"}
        for number in lacks.keys() - self.decoders.keys():
            lacks[number] |= wanted & {"tokenizer"}
        left_out = [each for each in self.data_sets if lacks[each.number]]
        names = ", ".join(sorted({_LACKED[what] for found in lacks.values() for what in found}))
        if left_out and left_out == self.data_sets:
            is_scored = "scores" not in wanted or self.database.count("scores")
            remedy = "" if is_scored else ": run the score stage (python -m flows.score) first"
            raise SkippedError(f"the data sets lack {names}{remedy}")
        return left_out, names


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a check, which has already noted its cases in the database."""

    value: float  # compared with the threshold
    of: int  # number of units that were checked
    says: str  # a sentence with the numbers
    judged: float = 1.0  # share of its sample that the check could judge
    share_of: int = 0  # number of units of which `value` is a share, if these are not all


class SkippedError(Exception):
    """A check cannot run; the message says why."""


Run = Callable[[AuditEvidence], Measured]
_LACKED = {**LACKED, "tokenizer": "a tokenizer, as no checkpoint of their runs is left"}
_NEEDS = {"nothing", "rows", "calls", "scored", *_LACKED}
"""Needs of a check, separated by blanks: at least one row, and also any score, a call of a tool, or what a data set may
lack, which is then left out."""


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One entry of the registry."""

    name: str  # as in `audit.checks`
    unit: Unit  # of its cases
    needs: str  # words of `_NEEDS`
    run: Run  # notes the cases (`AuditDatabase.flag`) and measures, or raises `SkippedError`

    @property
    def about(self) -> str:
        """The description of the check's knob in the configuration."""
        return (Checks.model_fields[self.name].description or "").replace("\n", " ")


_CHECKS: dict[str, AuditCheck] = {}


@cache
def all_checks() -> dict[str, AuditCheck]:
    """Return all checks by name; the first call imports their modules and reads their SQL."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for path in sorted(Path(__file__).parent.glob("*.sql")):
        for block in re.split(r"^(?=-- check:)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            _declare(block)
    return _CHECKS


def check(name: str, unit: Unit, needs: str = "rows") -> Callable[[Run], Run]:
    """Register the decorated function as a check; the arguments are those of `AuditCheck`."""
    assert name in Checks.model_fields, f"check {name!r} has no knob in configs/audit.py: declare it there"
    assert set(needs.split()) <= _NEEDS, f"check {name!r} needs {needs!r}: it may need {sorted(_NEEDS)}"

    def register(run: Run) -> Run:
        _CHECKS[name] = AuditCheck(name, unit, needs, run)
        return run

    return register


def _declare(block: str) -> None:
    """Register a check that is declared in SQL: lines `-- name: value` with the fields of `AuditCheck`, then queries.

    The first query returns the cases: id, number of the data set, detail. Before it, `-- before:` may have statements
    that make tables for it, and after it, `-- also turn:` (or another unit) a query of more cases, of that unit. One of
    these says how the check is measured:
    - `says`: the value is the number of cases. In this sentence `{found}` stands for it, and `{of}` for the number of
      rows of the table `among` (default: episodes).
    - `share`: the query returns all units that are counted, with a fourth column, whether it is a case. The value is
      the highest share in a data set; `share` ends the sentence.
    - `-- measured:`: a query of the columns of `Measured`.
    """
    fields = dict(re.findall(r"^-- (check|unit|says|share|among|needs): (.*)$", block, re.MULTILINE))
    name, unit = fields["check"], fields["unit"]
    first, *parts = re.split(r"^-- (before|cases|also [a-z]+|measured):\n", block, flags=re.MULTILINE)
    parts = parts if "before" in parts else ["cases", first, *parts]
    queries = dict(zip(parts[::2], parts[1::2], strict=True))
    units = {"cases": unit} | {part: part.removeprefix("also ") for part in queries if part.startswith("also ")}

    @check(name, unit, fields.get("needs", "rows"))
    def run(evidence: AuditEvidence) -> Measured:
        database, settings = evidence.database, evidence.settings
        database.set("threshold", getattr(settings.checks, name).threshold)
        database.set("complete", evidence.complete)
        database.set("least_episodes", settings.least_episodes)
        database.connection.execute(queries.get("before", ""))
        if "share" in fields:
            return _highest_share(database, name, unit, queries["cases"], fields["share"])
        found, *_ = [database.flag(name, of, queries[part]) for part, of in units.items()]
        if "measured" in queries:
            return Measured(*database.one(queries["measured"]))
        of = database.count(fields.get("among", "episodes"))
        return Measured(found, of, fields["says"].format(found=found, of=of))


def _highest_share(database: AuditDatabase, name: str, unit: Unit, query: str, what: str) -> Measured:
    columns = "id, data_set, detail, is_case"
    database.connection.execute(f"create or replace temp table counted as from ({query}) as t({columns})")
    database.flag(name, unit, "select id, data_set, detail from counted where is_case")
    query = """select count(*) filter (is_case) / count(*) as share, version, count(*) filter (is_case), count(*)
        from counted join data_sets using (data_set) where not is_left_out(data_set)
        group by version order by share desc, version"""
    rows = database.all(query)
    cases, whole = sum(row[2] for row in rows), sum(row[3] for row in rows)
    says = f"{cases:,} of {whole:,} {what} ({cases / max(whole, 1):.1%})"
    share, version, _, of = rows[0] if rows else (0.0, "", 0, 0)
    if len(rows) > 1 and cases:
        says += f"; the highest share, {share:.1%}, in {version}"
    return Measured(share, whole, says, share_of=of)
