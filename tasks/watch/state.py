"""Where a run is, from the store alone: from its manifests, metrics, lease and the journal of an unfinished rollout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from configs.audit import Audit
from storage import layout
from storage.errors import StorageError
from storage.logs.leases import Tenure, tenures
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.drafts import shards
from storage.versions.manifests import Manifest
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row, by_iteration
from tasks.rollout.outcomes import FaultAlarm

RECENT = 10
"""Iterations from whose median duration the time left is expected."""
_STAGES = (
    ("rollout", "time/rollout", "tokens/generated"),
    ("score", "time/score", ""),
    ("train", "time/train", "tokens/trained"),
)


@dataclass(frozen=True, slots=True)
class Spent:
    """Time and tokens of a stage over the whole run; None where they are not counted.

    Example: Spent("rollout", newest_s=1.9, seconds=57.2, share=0.61, tokens=204_570, per_second=3576.4)
    """

    stage: str
    newest_s: float | None
    seconds: float
    share: float  # of the time in which flow runs worked
    tokens: int | None = None
    per_second: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A run as the store shows it at one moment."""

    run: str
    uri: str
    rows: list[Row]
    total: int  # iterations
    done: int  # iterations with a checkpoint
    stage: str  # what is going on or comes next
    holder: Tenure | None  # the newest flow run
    stored: int  # episodes of the unfinished data set
    expected: int  # episodes of a whole data set; 0: no rollout is left
    left_s: float | None
    worked_s: float
    spent: list[Spent]
    alarms: list[tuple[int, str]]  # iteration and sentence, newest first
    data_set: str | None  # the newest one
    per_hour: float | None

    @property
    def is_working(self) -> bool:
        return self.holder is not None and not self.holder.ended


def read_state(store: Store, run: str, per_hour: float | None = None) -> State:
    """Read where a run is; `per_hour` is a price instead of the run's `cost.per_hour`.

    Raises:
        StorageError: there is no such run, or something of it is damaged.
    """
    begun = manifests.find(store, layout.run(run))
    if begun is None:
        raise StorageError(f"{store.uri(f'runs/{run}')} is no run: check the name and --root")
    rows = read_rows(store, run)
    versions = [row["version"] for row in rows if row["stage"] != "evaluate"]
    newest = manifests.read(store, versions[-1]) if versions else begun  # some knobs change while a run lasts
    total, merged = int(newest.number("run.iterations")), by_iteration(rows)
    ended_at = [datetime.fromisoformat(row["at"]) for row in rows if row["stage"] == "train"]
    done = max((row["iteration"] + 1 for row in rows if row["stage"] == "train"), default=0)
    durations = [(after - before).total_seconds() for before, after in pairwise(ended_at)][-RECENT:]
    held = [tenure for tenure in tenures(store, run) if tenure.label != "gc"]
    worked_s = sum(tenure.seconds for tenure in held)
    data_sets = [row["version"] for row in rows if row["stage"] == "rollout"]
    stored, expected = _unfinished(store, run, len(data_sets), total, newest)
    return State(
        run=run,
        uri=store.uri(f"runs/{run}"),
        rows=rows,
        total=total,
        done=done,
        stage=_stage(store, run, rows, done, total, int(newest.number("evaluation.every"))),
        holder=held[-1] if held else None,
        stored=stored,
        expected=expected,
        left_s=median(durations) * max(0, total - done) if durations else None,
        worked_s=worked_s,
        spent=list(_spent(rows, worked_s, overlapping=bool(newest.knob("run.overlap")))),
        alarms=sorted(_alarms(merged, newest), key=lambda alarm: -alarm[0]),
        data_set=data_sets[-1] if data_sets else None,
        per_hour=per_hour or newest.knob("cost.per_hour"),
    )


def _stage(store: Store, run: str, rows: Sequence[Row], done: int, total: int, every: int) -> str:
    """Name the stage that follows from what is committed."""
    here = {row["stage"] for row in rows if row["iteration"] == done}
    if not done and not manifests.committed(store, layout.checkpoint(run, 0)):
        return "policy version 0"
    if "score" in here or "rollout" in here:
        return "train" if "score" in here else "score"
    if "evaluate" not in here and (done % every == 0 or done >= total):
        return "evaluation"
    return "report" if done >= total else "rollout"


def _unfinished(store: Store, run: str, iteration: int, total: int, newest: Manifest) -> tuple[int, int]:
    """Count the episodes of the next data set that are in finished shards, and all that it will have."""
    if iteration >= total:
        return 0, 0
    finished = shards(store, layout.trajectories(run, iteration)).values()
    size = newest.knob("rollout.generation_size") or newest.number("rollout.group_size")
    expected = int(newest.number("rollout.problems_per_iteration") * size)
    return sum(shard.file.rows or 0 for shard in finished), expected


def _spent(rows: Sequence[Row], worked_s: float, *, overlapping: bool) -> Iterator[Spent]:
    """Sum up the stages. What is left of the time is no stage's, unless stages overlap."""
    other = worked_s
    for stage, time, count in _STAGES:
        seconds = [row[time] for row in rows if row["stage"] == stage and time in row]
        if not seconds:
            continue
        tokens = int(sum(row.get(count, 0) for row in rows if row["stage"] == stage)) if count else None
        whole = sum(seconds)
        rate = tokens / whole if tokens and whole else None
        yield Spent(stage, seconds[-1], whole, whole / worked_s if worked_s else 0.0, tokens, rate)
        other -= whole
    if worked_s and other > 0 and not overlapping:
        yield Spent("other", None, other, other / worked_s)


def _alarms(merged: Mapping[int, Row], newest: Manifest) -> Iterator[tuple[int, str]]:
    """Yield the alarms of all iterations: those of the console, and checks of the audit that need only metrics.

    A check raises an alarm where its value rises above the threshold, and not again while it stays there.
    """
    faults, checks = FaultAlarm(), Audit.model_validate(newest.knob("audit") or {}).checks
    before = set[str]()
    for number, row in merged.items():
        shares = {name.removeprefix("faults/"): row[name] for name in row if name.startswith("faults/")}
        yield from ((number, f"{alarm}.") for alarm in faults.raised_by({"faults": shares}))
        failed = row.get("verdicts/timeout", 0) + row.get("verdicts/error", 0)
        measured = {
            "zero_variance": (row.get("share/zero_variance", 0), "of the groups have equal returns: nothing to learn"),
            "truncated": (row.get("share/truncated", 0), "of the episodes were cut by a token limit"),
            "verdict_failures": (failed / max(1, row.get("turns", 0)), "of the verdicts are timeouts or errors"),
            "verdicts_disagree": (row.get("verdicts/disagree", 0), "of the verdicts differ from the environment's"),
        }
        now = {name: says for name, (value, says) in measured.items() if value > getattr(checks, name).threshold}
        for name in now.keys() - before:
            if getattr(checks, name).severity != "ignore":
                yield number, f"{measured[name][0]:.1%} {now[name]}."
        if row.get("trajectories") == 0:
            yield number, "Nothing was left to train on."
        if row.get("reward/all_minimal"):
            now["all_minimal"] = "no turn is right, so there is nothing to learn yet."
            if "all_minimal" not in before:
                yield number, now["all_minimal"].capitalize()
        before = set(now)
