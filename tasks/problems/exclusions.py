"""Exclusions: trajectories and problems that are kept out of training.

A version of exclusions never changes; runs name versions in `problems.exclusions`. A version lists trajectories. If it
excludes a whole problem, no trajectory of that problem is trained on, old or new, and the problem is not drawn again.
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
from storage.version_names import ExclusionsVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Provenance, stage
from tasks.problems.problem_set import key

_ROWS_PER_SHARD = 50_000


@dataclass(frozen=True, slots=True)
class Excluded:
    """The trajectories and problems that some versions exclude together.

    Example: Excluded(trajectories={("runs/demo/trajectories/000003", "demo/000003/12+7/0")}, problems={"9f3a"})
    """

    trajectories: frozenset[tuple[str, str]] = frozenset()  # (version of the data set, trajectory id)
    problems: frozenset[str] = frozenset()  # keys of the problems that are excluded as a whole

    def has(self, row: Trajectory, data_set: str) -> bool:
        """Return whether `row` of the version `data_set` is excluded."""
        alone = (data_set, row.trajectory_id) in self.trajectories
        return alone or self.has_problem(Problem(row.problem_id, row.prompt, row.solutions, metadata=row.metadata))

    def has_problem(self, problem: Problem) -> bool:
        """Return whether a problem is excluded as a whole; for older programs all settings were one problem."""
        of_older_programs = dataclasses.replace(problem, metadata="{}")
        return bool(self.problems) and not self.problems.isdisjoint([key(problem), key(of_older_programs)])


def exclusions_version(rows: Iterable[Exclusion]) -> ExclusionsVersion:
    """Compute the name of the version that holds exactly these rows, in any order."""
    lines = sorted(json.dumps(dataclasses.asdict(row), sort_keys=True) for row in rows)
    return layout.exclusions(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])


def commit_exclusions(store: Store, rows: Sequence[Exclusion], provenance: Provenance | None = None) -> str:
    """Commit `rows` as a version, unless it exists, and return its name. Its parents are the rows' data sets.

    Raises:
        ValueError: there are no rows.
        StorageError: a data set's manifest is damaged.
    """
    if not rows:
        raise ValueError("there are no rows to exclude: a version of exclusions holds at least one row")
    version = exclusions_version(rows)
    data_sets = sorted({row.data_set for row in rows if row.data_set})
    parents = [data_set for data_set in data_sets if manifests.committed(store, data_set)]
    metrics = {
        "trajectories": sum(bool(row.trajectory_id) for row in rows),
        "problems": len({row.problem_key for row in rows if row.whole_problem}),
        "reasons": sorted({row.reason for row in rows}),
    }
    with stage(store, version) as draft:
        if draft:
            datasets.write_rows(draft, EXCLUSION_SCHEMA, sorted(rows, key=dataclasses.astuple), _ROWS_PER_SHARD)
            draft.commit(provenance or Provenance(config={}), parents, metrics)
    return version


def read_exclusions(store: Store, versions: Iterable[str], cache: Path) -> Excluded:
    """Read what `versions` exclude together.

    Raises:
        StorageError: see `check_exclusions`; or a version is damaged.
    """
    distinct = list(dict.fromkeys(versions))
    check_exclusions(store, distinct)
    rows = [Exclusion(**row) for version in distinct for row in datasets.rows(store, version, cache)]
    return Excluded(
        frozenset((row.data_set, row.trajectory_id) for row in rows if row.trajectory_id),
        frozenset(row.problem_key for row in rows if row.whole_problem),
    )


def check_exclusions(store: Store, versions: Iterable[str]) -> None:
    """Check the manifests of the versions in `problems.exclusions`.

    Raises:
        StorageError: a version does not exist, is damaged, or is no version of exclusions; the message says what to do.
    """
    root = f"--root {shlex.quote(store.root)}"
    remedy = f"`python -m storage {root} ls --kind exclusions` lists the existing ones, "
    remedy += f"`python -m tasks.provenance {root} exclude` makes one; or remove it from problems.exclusions"
    for version in versions:
        manifest = manifests.find(store, version)
        if manifest is None or manifest.kind != "exclusions":
            raise DamagedError(f"problems.exclusions: {store.uri(version)} is no version of exclusions. {remedy}")


def set_aside(rows: Iterable[Trajectory], data_set: str, excluded: Excluded) -> tuple[list[Trajectory], list[str]]:
    """Mark the excluded rows of the version `data_set` as rejected; return all rows, and the ids of the excluded ones.

    They are not removed, because an update has a rule for the case that all rows are rejected.
    """
    reason, marked = "excluded by problems.exclusions", [(row, excluded.has(row, data_set)) for row in rows]
    kept = [dataclasses.replace(row, status="rejected", reason=reason) if out else row for row, out in marked]
    return kept, [row.trajectory_id for row, out in marked if out]


def left_of(problems: Sequence[Problem], excluded: Excluded) -> list[Problem]:
    """List the problems that may be drawn, in their order.

    Raises:
        ValueError: all problems are excluded.
    """
    left = [problem for problem in problems if not excluded.has_problem(problem)]
    if problems and not left:
        raise ValueError(
            f"problems.exclusions excludes all {len(problems)} training problems, and nothing is left to draw: remove "
            "versions from it, or add problems (corrected ones are new problems)"
        )
    return left
