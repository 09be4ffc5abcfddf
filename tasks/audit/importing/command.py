"""`import`: make data sets of the dumps of another program, score them, and say what they lack.

A version that exists is not made again, so the same command continues after an interruption.
"""

import argparse
import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from configs import Config, load
from storage import layout
from storage.commands.program import Output, table
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, TRAJECTORY_SCHEMA
from storage.version_names import EvaluationVersion, ScoresVersion, TrajectoriesVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from tasks.audit.checks import LACKED, all_checks
from tasks.audit.importing.formats import FORMATS, read_row
from tasks.audit.importing.rollout import Rollout
from tasks.audit.importing.trajectories import add_tokens, problem_of, to_trajectory
from tasks.problems import fingerprint
from tasks.problems.problem_set import BadRow, Where, listed, refuse_bad_rows
from tasks.problems.sources import find, read_jsonl, read_parquet

if TYPE_CHECKING:
    from tasks.agents.chat import Chat

_ROWS_PER_SHARD = 5_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `import`."""
    parser.add_argument("files", nargs="+", help="JSONL or Parquet, URIs or patterns such as 'dumps/*.jsonl'")
    parser.add_argument("--format", required=True, choices=FORMATS, help="the program that wrote the files")
    parser.add_argument("--name", required=True, help="name of the run that will hold the data sets")
    parser.add_argument("--tokenizer", default="", help="folder of the model's tokenizer, which makes and shows tokens")
    parser.add_argument("--evaluation", default="", metavar="SET", help="these are evaluations on a set of this name")
    config = "configuration whose score, reward and audit count, and its knobs; default demo"
    parser.add_argument("--config", nargs="+", default=["demo"], metavar=("NAME", "key=value"), help=config)


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Import and score the files.

    Raises:
        ValueError: a file cannot be read, too many rows are bad, or the run holds something else.
        StorageError: the store does not answer, or another process writes the run.
    """
    if not re.fullmatch(r"[\w.-]*", arguments.evaluation, re.ASCII):
        raise ValueError(f"--evaluation={arguments.evaluation}: give a name of letters, digits, points and dashes")
    base, *knobs = arguments.config
    knobs += [f"run.name={arguments.name}", f"storage.root={store.root}", f"storage.cache={arguments.cache}"]
    config, chat = load(base, knobs), _load_chat(arguments.tokenizer)
    rollouts, bad = read(arguments.files, arguments.format, chat)
    named, remedy = ", ".join(arguments.files), f"check that --format={arguments.format} is right"
    refuse_bad_rows(named, len(rollouts), bad, config.problems.max_bad_share, remedy)
    lacks = Counter(what for rollout in rollouts for what in rollout.lacks)
    if lacks["golds"]:
        config = load(base, ["score.type=environment", *knobs])
    with Lease(store, config.run.name, label="import") as lease:
        provenance = Provenance(config=config.model_dump(mode="json"), fence=lease)
        _commit_run(store, provenance, arguments, chat)
        versions = _commit_data_sets(store, provenance, arguments, rollouts)
        made = list(zip(versions, _score(store, versions, config, provenance, Path(arguments.cache)), strict=True))
    said = [f"bad row, left out: {line}" for line in listed(bad)]
    said.append(f"scored by {config.score.type}; again: python -m flows.score … run.name={arguments.name} score.type=…")
    lacking = [
        (LACKED[what], count, ", ".join(each.name for each in all_checks().values() if what in each.needs.split()))
        for what, count in sorted(lacks.items())
    ]
    parts = [table(["data set", "scores"], made, f"{len(rollouts):,} episodes")]
    parts.append(table(["lacking", "episodes", "checks that leave these data sets out"], lacking))
    return Output({"data_sets": made, "lacks": lacking, "says": said}, [*parts, *said])


def read(patterns: Iterable[str], form: str, chat: "Chat | None") -> tuple[list[Rollout], list[BadRow]]:
    """Read the files of one format; return the episodes and the bad rows.

    Raises:
        ProblemError: a file cannot be read.
    """
    rollouts, bad = list[Rollout](), list[BadRow]()
    for name, path in (file for pattern in patterns for file in find(pattern)):
        for line, row in read_parquet(path) if path.endswith((".parquet", ".pq")) else read_jsonl(path):
            where = Where(line, name or PurePosixPath(path).name)
            try:
                rollout = read_row(row, form, str(where))
                problem_of(rollout)
                if chat:
                    add_tokens(rollout, chat)
                rollouts.append(rollout)
            except ValueError as error:  # that of the template, too
                bad.append(BadRow(where, str(error)))
    return rollouts, bad


def _load_chat(folder: str) -> "Chat | None":
    if not folder:
        return None
    from tasks.agents.chat import Chat, load_tokenizer

    try:
        return Chat(load_tokenizer(Path(folder)))
    except Exception as error:  # the library raises no narrower error
        raise ValueError(f"--tokenizer={folder} needs a tokenizer and a chat template: {error}") from error


def _commit_run(store: Store, provenance: Provenance, arguments: argparse.Namespace, chat: "Chat | None") -> None:
    """Commit the run, with the tokenizer, unless it exists. Raises ValueError: it holds something else."""
    version, holds = layout.run(arguments.name), {"format": arguments.format, "tokenizer": bool(chat)}
    if there := manifests.find(store, version):
        if there.imported != holds:
            raise ValueError(f"the run {arguments.name} exists and holds something else: give another --name")
        return
    with Draft(store, version, "run") as draft:
        if chat:
            chat.tokenizer.save_pretrained(draft.scratch / "model")
            draft.add_folder(draft.scratch / "model", "model")
        draft.commit(provenance, [], {"imported": holds})


def _commit_data_sets(
    store: Store, provenance: Provenance, arguments: argparse.Namespace, rollouts: Sequence[Rollout]
) -> list[TrajectoriesVersion]:
    """Commit the problem set, and trajectories for each step, unless they exist; return the latter.

    Raises:
        ValueError: a data set exists and has other rows.
    """
    problems = {problem.problem_id: problem for problem in map(problem_of, rollouts)}.values()
    problem_set, versions, samples = layout.problems(fingerprint(problems)), list[TrajectoriesVersion](), Counter[str]()
    if not manifests.committed(store, problem_set):
        with Draft(store, problem_set, "problems") as draft:
            datasets.write_rows(draft, PROBLEM_SCHEMA, problems, _ROWS_PER_SHARD)
            draft.commit(provenance, [], {"problems": len(problems), "source": {"kind": arguments.format}})
    for step, group in groupby(sorted(rollouts, key=lambda each: each.step), lambda each: each.step):
        of_step = list(group)
        rows = [to_trajectory(each, samples, arguments.name, problem_set, arguments.format) for each in of_step]
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
        version: TrajectoriesVersion = layout.trajectories(arguments.name, step)
        if arguments.evaluation:
            policy = layout.checkpoint(arguments.name, step)
            version = layout.evaluation(policy, arguments.evaluation, f"sampled-{digest}")
        versions.append(version)
        if there := manifests.find(store, version):
            if there.metrics.get("digest") != digest:
                raise ValueError(f"{version} exists and has other rows: give another --name")
            continue
        with Draft(store, version, "evaluation" if arguments.evaluation else "trajectories") as draft:
            datasets.write_rows(draft, TRAJECTORY_SCHEMA, rows, _ROWS_PER_SHARD)
            lacks = sorted({what for each in of_step for what in each.lacks})
            draft.commit(provenance, [problem_set], {"digest": digest, "lacks": lacks, "trajectories": len(rows)})
    return versions


def _score(
    store: Store, versions: Sequence[TrajectoriesVersion], config: Config, provenance: Provenance, cache: Path
) -> list[ScoresVersion]:
    """Score the data sets, unless their scores are committed; return the versions of the scores."""
    from tasks.score.scorers import Scorers, check_scorers
    from tasks.score.scoring import metrics_of, score_rows, scorer_fingerprint
    from tasks.score.verifier import Verifier

    check_scorers(config.score)
    settings, name, scores = config.score, scorer_fingerprint(config.score), list[ScoresVersion]()
    with Verifier(settings.workers, settings.timeout_s, reading=settings.reading) as verifier:
        scorers = Scorers(settings, verifier)
        for version in versions:
            if isinstance(version, EvaluationVersion):
                scores.append(layout.evaluation_scores(version, name))
            else:
                scores.append(layout.scores(config.run.name, version.number, name))
            if not manifests.committed(store, scores[-1]):
                with Draft(store, scores[-1], "scores") as draft:
                    begun = time.monotonic()
                    rows = datasets.rows(store, version, cache, scorers.columns)
                    grades = score_rows(rows, scorers, draft, _ROWS_PER_SHARD)
                    draft.commit(provenance, [version], metrics_of(grades, settings, time.monotonic() - begun))
    return scores
