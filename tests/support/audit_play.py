"""Hand-written episodes in the form of an agent, a store with one data set of them, and audit checks on it."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.audit import Audit, Checks
from storage.objects.store import Store
from storage.records import Problem, Score, Trajectory, VerdictName
from storage.versions import checkpoints
from storage.versions.checkpoints import Canary
from tasks.agents.chat import Chat
from tasks.audit.checks import AuditEvidence, Measured, all_checks
from tasks.audit.checks.functions import add_functions
from tasks.audit.database import open_database
from tasks.audit.results import CheckResult
from tasks.audit.run import audit
from tasks.score.verifier import Verifier
from tasks.tables.sets import fetch_data_sets, select
from tests.support.audit_scene import play
from tests.support.chain_helpers import FIRST, PROBLEMS, PROVENANCE, SCORES, TRAJECTORIES, commit_rows
from tests.support.train_helpers import make_trajectory

FEEDBACK = "Your answer is wrong. Try again."
SUM = Problem("12+7", "What is 12 + 7?", ["19"])

TEXTS = {
    "secrets": [
        ("AKIA" + "Q" * 16, "an AWS key (AKIA…)"),
        ("password: hunter22", "a password (hunt…)"),
        ("db://me:pass@host", "a URL with a password (db:/…)"),
        ("-----BEGIN PRIVATE KEY-----", "a private key (----…)"),
        ("the password = required", ""),
    ],
    "personal_data": [
        ("anna.b@mail.org", "an e-mail address (anna…)"),
        ("Call +49 170 1234567.", "a telephone number (+49 …)"),
        ("My number is 212-09-7694", "a social security number (212-…)"),
        ("4111 1111 1111 1111", "a card number (4111…)"),
        ("DE89 3704 0044 0532 0130 00", "an IBAN (DE89…)"),
        ("4111 1111 1111 1112", ""),
        ("DE89 3704 0044 0532 0130 01", ""),
        ("120-15-1000 = -895", ""),
        ("x = +49 170 1234567", ""),
    ],
    "hidden_characters": [("abc\u202edef", "has U+202E"), ("a\x00b", "has U+0000"), ("tab\tand\nline", "")],
}
"""For each check, texts and the end of the detail of their cases; it is empty for harmless texts."""


def only(*names: str, **knobs: object) -> Audit:
    """Return settings for a few checks, or for all without a name; less takes a fraction of the time."""
    ignored = {name: {"severity": "ignore"} for name in Checks.model_fields if names and name not in names}
    return Audit(recomputed=0, checks=Checks.model_validate(ignored | dict.fromkeys(names, knobs)))


def checks_of(store: Store, verifier: Verifier, *targets: str, settings: Audit | None = None) -> dict[str, CheckResult]:
    """Audit data sets; return the results by check."""
    cache = Path(store.path("cache"))
    with audit(store, select(store, targets), settings or only(), cache, verifier) as found:
        return {check.name: check for check in found.result.checks}


class Play:
    """Writes episodes in the form of an agent with this tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.chat = tokenizer, Chat(tokenizer)

    def __call__(
        self, name: str, *answers: str, problem: Problem = SUM, feedback: str = FEEDBACK, before: str = ""
    ) -> Trajectory:
        known = {"prompt": problem.prompt, "solutions": problem.solutions, "policy": FIRST}
        row = dataclasses.replace(make_trajectory(name, [], problem=problem.problem_id), **known)  # type: ignore[arg-type]
        played = play(self.chat, row, answers, prompt=before + problem.prompt, feedback=feedback)
        return dataclasses.replace(played, logprobs=[-1.0 if sampled else 0.0 for sampled in played.action_mask])


class Audited:
    """A store with one data set of a run, and audit checks on it."""

    def __init__(self, store: Store, folder: Path, verifier: Verifier) -> None:
        self.store, self.folder, self.verifier = store, folder, verifier
        commit_rows(store, PROBLEMS, "problems", [SUM], [])

    def add_policy(self, model: Path) -> None:
        checkpoints.commit(self.store, FIRST, model, None, Canary([1], []), PROVENANCE, [], {})

    def add(self, rows: Sequence[Trajectory], *scores: Score, parents: Sequence[str] = (FIRST, PROBLEMS)) -> None:
        commit_rows(self.store, TRAJECTORIES, "trajectories", list(rows), list(parents))
        if scores:
            commit_rows(self.store, SCORES, "scores", list(scores), [TRAJECTORIES])

    def run(self, check: str) -> tuple[Measured, list[tuple[Any, ...]]]:
        """Run a check; return its measurement, and (id, detail) of its cases."""
        with self.evidence() as evidence:
            measured = all_checks()[check].run(evidence)
            query = "select id, detail from cases where check_name = ? order by all"
            return measured, evidence.database.all(query, check)

    @contextmanager
    def evidence(self) -> Iterator[AuditEvidence]:
        data_sets, settings = select(self.store, ["r"]), Audit()
        intake = fetch_data_sets(self.store, data_sets, self.folder)
        with open_database(data_sets, intake, settings) as database:
            evidence = AuditEvidence(database, self.store, self.folder, data_sets, intake, settings, self.verifier)
            add_functions(evidence)
            yield evidence


def scored(row: Trajectory, *verdicts: VerdictName) -> list[Score]:
    """Make the scores of a row whose answers are boxed."""
    return [
        Score(row.trajectory_id, turn, verdict, right, row.turns[turn].text[7:-1], "19", "", right)
        for turn, verdict in enumerate(verdicts)
        for right in [float(verdict == "correct")]
    ]
