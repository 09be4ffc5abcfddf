"""Stores of generated data sets for tests of the audit: problems, policies with their logprobs, and commits."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from configs import Config, load
from configs.problems import ArithmeticSource
from storage import layout
from storage.objects.store import Store
from storage.records import Problem
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance
from tasks.problems import fingerprint
from tasks.problems.generated import generate
from tests.support.chain_helpers import commit_rows


@cache
def settings(run: str, *overrides: str) -> Config:
    """Return the demo's configuration for a run of this name."""
    return load("demo", [f"run.name={run}", "sampling.max_new_tokens=12", *overrides])


def sums(count: int, split: str = "train") -> list[Problem]:
    """Make problems like `What is 31 + 8?` with operands up to 99."""
    source = {"kind": "arithmetic", "split": split, "high": 99, "operators": ["+"], "count": count}
    return generate(ArithmeticSource.model_validate(source))


def commit_problems(store: Store, problems: Sequence[Problem]) -> str:
    """Commit a problem set if it is new; return its version."""
    version = layout.problems(fingerprint(problems))
    if not manifests.committed(store, version):
        commit(store, version, "problems", problems, [], settings("problems"))
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
    rows: Sequence[Any],
    parents: Sequence[str],
    config: Config,
    rows_per_shard: int = 25_000,
) -> None:
    commit_rows(store, version, kind, rows, parents, config=config.model_dump(mode="json"), shard=rows_per_shard)


def _provenance(config: Config) -> Provenance:
    return Provenance(config=config.model_dump(mode="json"))
