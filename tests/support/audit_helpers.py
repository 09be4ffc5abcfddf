"""Stores of generated data sets for tests of the audit: problems, policies with their logprobs, and commits."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs import Config, load
from configs.problems import ArithmeticSource
from storage import layout
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, Problem, to_table
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary
from storage.versions.datasets import write_parquet
from storage.versions.drafts import Draft, Provenance
from tasks.problems import fingerprint
from tasks.problems.arithmetic import generate

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

LIMIT = 12  # tokens of an answer


@cache
def settings(run: str, *overrides: str) -> Config:
    """Return the demo's configuration for a run of this name."""
    return load("demo", [f"run.name={run}", f"sampling.max_new_tokens={LIMIT}", *overrides])


def sums(high: int, count: int | None = None, split: str = "train") -> list[Problem]:
    """Make problems like `What is 31 + 8?` with operands up to `high`."""
    return generate(
        ArithmeticSource.model_validate(
            {"kind": "arithmetic", "split": split, "high": high, "operators": ["+"], "count": count}
        )
    )


def commit_problems(store: Store, problems: Sequence[Problem]) -> str:
    """Commit a problem set if it is new; return its version."""
    version = layout.problems(fingerprint(problems))
    if not manifests.committed(store, version):
        commit(store, version, "problems", to_table(list(problems), PROBLEM_SCHEMA), [], settings("problems"))
    return version


def commit_policy(store: Store, config: Config, number: int, model: Path, canary: Canary) -> str:
    """Commit a checkpoint of the run `config.run.name`, and the run if it is new; return the checkpoint's version."""
    run, version = layout.run(config.run.name), layout.checkpoint(config.run.name, number)
    if not manifests.committed(store, run):
        with Draft(store, run, "run") as draft:
            draft.commit(_provenance(config), [])
    checkpoints.commit(store, version, model, None, canary, _provenance(config), [run], {})
    return version


def commit(
    store: Store,
    version: str,
    kind: manifests.Kind,
    table: pa.Table,
    parents: Sequence[str],
    config: Config,
    rows_per_shard: int = 25_000,
) -> None:
    """Commit a data set of these rows."""
    with Draft(store, version, kind) as draft:
        for number, start in enumerate(range(0, table.num_rows, rows_per_shard)):
            part = table.slice(start, rows_per_shard)
            path = draft.scratch / f"part-{number:05d}.parquet"
            write_parquet(part, path)
            draft.add(path, path.name, part.num_rows)
            path.unlink()
        draft.commit(_provenance(config), parents)


def _provenance(config: Config) -> Provenance:
    return Provenance(config=config.model_dump(mode="json"))
