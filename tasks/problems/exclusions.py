"""What shall not be trained on: versions of exclusions are made once and never changed, and runs name them by
`problems.exclusions`.

A version lists trajectories. Where it excludes a whole problem, nothing that was played of it is trained on, whenever
that was, and it is not drawn again.
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import EXCLUSION_SCHEMA, Exclusion, Problem, Trajectory
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from tasks.problems.difference import key

_ROWS_PER_SHARD = 50_000


@dataclass(frozen=True, slots=True)
class Excluded:
    """All that some versions exclude.

    Example: Excluded(trajectories={("runs/demo/trajectories/000003", "demo/000003/12+7/0")}, problems={"9f3a"})
    """

    trajectories: frozenset[tuple[str, str]] = frozenset()  # version of the data set, id
    problems: frozenset[str] = frozenset()  # keys of those that are excluded whole

    def has(self, row: Trajectory, data_set: str) -> bool:
        """Whether `row` of the version `data_set` is excluded."""
        if (data_set, row.trajectory_id) in self.trajectories:
            return True
        return bool(self.problems) and key(Problem(row.problem_id, row.prompt, row.solutions)) in self.problems


def version_of(rows: Iterable[Exclusion]) -> str:
    """The version that holds exactly these rows, whatever their order."""
    lines = sorted(json.dumps(dataclasses.asdict(row), sort_keys=True) for row in rows)
    return layout.exclusions(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])


def commit_exclusions(store: Store, rows: Sequence[Exclusion], provenance: Provenance | None = None) -> str:
    """The version of `rows`, committed now unless it stands. Its parents are the data sets in which they lie.

    Raises:
        ValueError: there are no rows.
        StorageError: a data set's manifest is damaged.
    """
    if not rows:
        raise ValueError("nothing is to be excluded: a version of exclusions holds at least one row")
    version = version_of(rows)
    if manifests.committed(store, version):
        return version
    data_sets = sorted({row.data_set for row in rows if row.data_set})
    parents = [data_set for data_set in data_sets if manifests.committed(store, data_set)]
    metrics = {
        "trajectories": sum(bool(row.trajectory_id) for row in rows),
        "problems": len({row.problem_key for row in rows if row.whole_problem}),
        "reasons": sorted({row.reason for row in rows}),
    }
    with Draft(store, version, "exclusions") as draft:
        ordered = sorted(rows, key=dataclasses.astuple)
        datasets.write_rows(draft, EXCLUSION_SCHEMA, ordered, _ROWS_PER_SHARD)
        draft.commit(provenance or Provenance(config={}), parents, metrics)
    return version


def read_exclusions(store: Store, versions: Iterable[str], cache: Path) -> Excluded:
    """What `versions` exclude together; nothing where there are none.

    Raises:
        StorageError: see `check_exclusions`; or one is damaged.
    """
    found = list(dict.fromkeys(versions))
    check_exclusions(store, found)
    rows = [Exclusion(**row) for version in found for row in datasets.rows(store, version, cache)]
    return Excluded(
        frozenset((row.data_set, row.trajectory_id) for row in rows if row.trajectory_id),
        frozenset(row.problem_key for row in rows if row.whole_problem),
    )


def check_exclusions(store: Store, versions: Iterable[str]) -> None:
    """Look at the manifests of `problems.exclusions`.

    Raises:
        StorageError: one is not there, is damaged, or no version of exclusions; says what to do.
    """
    for version in versions:
        try:
            kind = manifests.read(store, version).kind
        except DamagedError as error:
            raise DamagedError(f"problems.exclusions: {error}. {_remedy(store)}") from error
        if kind != "exclusions":
            raise DamagedError(f"problems.exclusions: {store.uri(version)} is a {kind} version. {_remedy(store)}")


def _remedy(store: Store) -> str:
    root = f"--root {shlex.quote(store.root)}"
    return (
        f"`python -m storage {root} ls --kind exclusions` lists those there are, `python -m tasks.provenance "
        f"{root} exclude` makes one; or leave it out of problems.exclusions"
    )


def set_aside(rows: Iterable[Trajectory], data_set: str, excluded: Excluded) -> tuple[list[Trajectory], list[str]]:
    """`rows` of the version `data_set`, of which the excluded ones count as rejected, and the ids of these.

    Rejected and not left out, because an update knows what to do where all are rejected.
    """
    found, aside = list[Trajectory](), list[str]()
    for row in rows:
        if excluded.has(row, data_set):
            aside.append(row.trajectory_id)
            row = dataclasses.replace(row, status="rejected", reason="excluded by problems.exclusions")
        found.append(row)
    return found, aside


def left_of(problems: Sequence[Problem], excluded: Excluded) -> list[Problem]:
    """Those of `problems` that may be drawn, in their order.

    Raises:
        ValueError: none is left.
    """
    left = [problem for problem in problems if key(problem) not in excluded.problems] if excluded.problems else problems
    if problems and not left:
        raise ValueError(
            f"problems.exclusions excludes all {len(problems)} training problems, and nothing is left to draw: take "
            "versions out of it, or add problems (corrected ones are new problems)"
        )
    return list(left)
