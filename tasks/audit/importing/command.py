"""`import`: make data sets of the dumps of another program, score them, and say what they lack.

A version that exists is not made again, so the same command continues after an interruption.
"""

import argparse
import hashlib
import os
import re
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path, PurePosixPath

from configs import Config, load
from storage import layout
from storage.commands.program import Output, table
from storage.errors import counted
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, TRAJECTORY_SCHEMA
from storage.version_names import TrajectoriesVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from tasks.agents.chat import Chat, engine_ends, load_tokenizer
from tasks.audit.checks import all_checks
from tasks.audit.importing.rollout import FORMATS, Rollout, add_tokens, problem_of, read_row, to_trajectory
from tasks.problems import fingerprint
from tasks.problems.problem_set import BadRow, Where, listed, refuse_bad_rows
from tasks.problems.sources import find, read_jsonl, read_parquet
from tasks.rollout.admission import check_ids
from tasks.tables.sets import LACKED

_ROWS_PER_SHARD = 5_000
_STEP = re.compile(
    r"(?<![a-z])(?:step|iter(?:ation)?|epoch|checkpoint|ckpt)[-_=]?(\d{1,6})(?!\d)|(?:^|/)(\d{1,6})(?=\.[^/]*$)", re.I
)
"""The step in the name of a file, such as `step_3/rows.jsonl` or `3.jsonl`."""
_KNOB = re.compile(r"[a-z_][a-z0-9_.]*=")


class UnshownRow(BadRow):
    """A row as it should be, whose conversation the chat template does not show: it counts as no bad row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `import`."""
    files = "JSONL or Parquet: paths, URIs, patterns. With an equals sign: a knob, such as storage.root=…"
    parser.add_argument("files", nargs="+", metavar="FILE|key=value", help=files)
    parser.add_argument("--format", required=True, choices=FORMATS, help="the program that wrote the files")
    parser.add_argument("--name", required=True, help="name of the run that will hold the data sets")
    parser.add_argument("--tokenizer", default="", help="folder of the model's tokenizer, which makes and shows tokens")
    parser.add_argument("--evaluation", default="", metavar="SET", help="these are evaluations on a set of this name")
    parser.add_argument("--config", default="demo", metavar="NAME", help="whose score, reward and audit count; demo")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Import and score the files.

    Raises:
        ValueError: a file cannot be read, too many rows are bad, or the run holds something else.
        StorageError: the store does not answer, or another process writes the run.
    """
    from tasks.score.scorers import check_scorers

    if not re.fullmatch(r"[\w.-]*", arguments.evaluation, re.ASCII):
        raise ValueError(f"--evaluation={arguments.evaluation}: give a name of letters, digits, points and dashes")
    given = [word for word in arguments.files if _KNOB.match(word) and not os.path.isfile(word)]
    files = [word for word in arguments.files if word not in given]
    knobs = [f"storage.root={store.root}", f"storage.cache={arguments.cache}", *given, f"run.name={arguments.name}"]
    config, chat = load(arguments.config, knobs), _load_chat(arguments.tokenizer)
    check_scorers(config.score)
    if config.score.models:
        raise ValueError("score.type: only flows ask models: import with another scorer, then use flows.score")
    store = Store(config.storage.root)
    rollouts, bad = read(files, arguments.format, chat)
    faulty = [row for row in bad if not (rollouts and isinstance(row, UnshownRow))]
    remedy = f"check that --format={arguments.format} is right"
    refuse_bad_rows(", ".join(files), len(rollouts), faulty, config.problems.max_bad_share, remedy)
    _keep_apart(rollouts)
    lacks = Counter(what for rollout in rollouts for what in rollout.lacks)
    if lacks["golds"]:
        config = load(arguments.config, ["score.type=environment", *knobs])
    made = _commit(store, config, arguments, rollouts, chat)
    if not any(manifests.read(store, scores).metrics["verdicts"].keys() - {"none"} for _, scores, _ in made):
        lacks["scores"] = len(rollouts)
    skipped = {what: [each.name for each in all_checks().values() if what in each.needs.split()] for what in lacks}
    lacking = [(LACKED[what], lacks[what], ", ".join(skipped[what]) or "none") for what in sorted(lacks)]
    root, lines = shlex.quote(config.storage.root), list[str]()
    if bad:
        of_all = f"{len(bad)} of {len(bad) + len(rollouts)} rows are left out"
        lines.append(f"{of_all}, {len(bad) - len(faulty)} of them without tokens")
    lines += [
        *(f"left out: {line}" for line in listed(bad)),
        f"scored by {config.score.type}. Next:",
        f"  python -m flows.audit_trajectories {arguments.name} storage.root={root}",
        f"  python -m tasks.audit --root {root} read {arguments.name}",
    ]
    if not arguments.evaluation:
        run = f"run.name={arguments.name} storage.root={root} score.type={config.score.type}"
        lines.append(f"  python -m flows.score {arguments.config} --iteration {rollouts[0].step} {run}")
    parts = [
        table(["data set", "scores", ""], made, counted(len(rollouts), "episode")),
        table(["lacking", "episodes", "checks that leave these data sets out"], lacking),
    ]
    return Output({"data_sets": made, "lacks": lacking, "says": lines}, [*parts, *lines])


def read(patterns: Iterable[str], form: str, chat: Chat | None) -> tuple[list[Rollout], list[BadRow]]:
    """Read the files of one format; return the episodes and the bad rows.

    Raises:
        ProblemError: a file cannot be read.
    """
    rollouts, bad = list[Rollout](), list[BadRow]()
    found = {path: name or PurePosixPath(path).name for pattern in patterns for name, path in find(pattern)}
    unique = len({*found.values()}) == len(found)
    for path, name in found.items():
        for line, row in read_parquet(path) if path.endswith((".parquet", ".pq")) else read_jsonl(path):
            where, kind = Where(line, name if unique else path), BadRow
            try:
                rollout = read_row(row, form, str(where))
                problem_of(rollout)
                if chat:
                    given = [ids for turn in rollout.turns for ids in (turn.prompt_token_ids, turn.token_ids) if ids]
                    check_ids("token ids", [*chain.from_iterable(given)], chat.vocabulary)
                    kind = UnshownRow
                    add_tokens(rollout, chat)
                rollouts.append(rollout)
            except Exception as error:  # noqa: BLE001 - whatever a row makes templates raise costs this row alone
                bad.append(kind(where, str(error) if isinstance(error, ValueError) else repr(error)))
    return rollouts, bad


def _keep_apart(rollouts: Sequence[Rollout]) -> None:
    """Set the steps of rows that tell none but the names of whose files do.

    Raises:
        ValueError: files have the same problems at the same step, as those of several models have.
    """
    played = defaultdict[tuple[int, str], set[str]](set)
    for each in rollouts:
        file = each.row.partition(" of ")[2]
        if "step" not in each.model_fields_set and (named := _STEP.findall(file)):
            each.step = int("".join(named[-1]))
        played[each.step, problem_of(each).problem_id].add(file)
    for (step, _), names in played.items():
        if len(names) > 1:
            both = " and ".join(sorted(names)[:2])
            remedy = "join parts of a step; import the files of each model under a --name of its own"
            raise ValueError(f"{both} have the same problems at step {step}: {remedy}")


def _load_chat(folder: str) -> Chat | None:
    try:
        path = Path(folder)
        ends = engine_ends(path) if (path / "config.json").exists() else ()
        return Chat(load_tokenizer(path), ends=ends) if folder else None
    except Exception as error:  # the library raises no narrower error
        raise ValueError(f"--tokenizer={folder} needs a tokenizer and a chat template: {error}") from error


def _commit(
    store: Store, config: Config, arguments: argparse.Namespace, rollouts: list[Rollout], chat: Chat | None
) -> list[tuple[str, str, str]]:
    """Commit run, problem set and, for each step, trajectories and scores; return these, and whether they were there.

    Raises:
        ValueError: the run or a data set exists and holds something else.
    """
    from tasks.score.scorers import Scorers
    from tasks.score.scoring import metrics_of, score_rows, scorer_fingerprint
    from tasks.score.verifier import Verifier

    name, settings, holds = arguments.name, config.score, {"format": arguments.format, "tokenizer": bool(chat)}
    problems = {problem.problem_id: problem for problem in map(problem_of, rollouts)}.values()
    problem_set, scorer = layout.problems(fingerprint(problems)), scorer_fingerprint(settings)
    with Lease(store, name, label="import") as lease, Verifier(settings.workers, settings.timeout_s) as verifier:
        provenance = Provenance(config=config.model_dump(mode="json"), fence=lease)
        scorers = Scorers(settings, verifier)
        if not manifests.committed(store, layout.run(name)):
            with Draft(store, layout.run(name), "run") as draft:
                if chat:
                    chat.tokenizer.save_pretrained(draft.scratch / "model")
                    draft.add_folder(draft.scratch / "model", "model")
                draft.commit(provenance, [], {"imported": holds})
        if manifests.read(store, layout.run(name)).metrics.get("imported") != holds:
            raise ValueError(f"the run {name} exists and holds something else: give another --name")
        if not manifests.committed(store, problem_set):
            with Draft(store, problem_set, "problems") as draft:
                datasets.write_rows(draft, PROBLEM_SCHEMA, problems, _ROWS_PER_SHARD)
                draft.commit(provenance, [], {"problems": len(problems), "source": {"kind": arguments.format}})
        samples, made = Counter[str](), list[tuple[str, str, str]]()
        for step, group in groupby(sorted(rollouts, key=lambda each: each.step), lambda each: each.step):
            of_step = list(group)
            rows = [to_trajectory(each, samples, name, problem_set, arguments.format) for each in of_step]
            digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
            lacks = sorted(set[str]().union(*(each.lacks for each in of_step)))
            version: TrajectoriesVersion = layout.trajectories(name, step)
            scores = layout.scores(name, step, scorer)
            if arguments.evaluation:
                version = layout.evaluation(layout.checkpoint(name, step), arguments.evaluation, f"sampled-{digest}")
                scores = layout.evaluation_scores(version, scorer)
            is_there = manifests.committed(store, scores)
            if not manifests.committed(store, version):
                with Draft(store, version, "evaluation" if arguments.evaluation else "trajectories") as draft:
                    datasets.write_rows(draft, TRAJECTORY_SCHEMA, rows, _ROWS_PER_SHARD)
                    metrics = {"digest": digest, "lacks": lacks, "trajectories": len(rows)}
                    draft.commit(provenance, [problem_set], metrics)
            if manifests.read(store, version).metrics.get("digest") != digest:
                raise ValueError(f"{version} exists and has other rows: give another --name")
            if not is_there:
                with Draft(store, scores, "scores") as draft:
                    begun = time.monotonic()
                    grades = score_rows(map(asdict, rows), scorers, draft, _ROWS_PER_SHARD)
                    draft.commit(provenance, [version], metrics_of(grades, settings, time.monotonic() - begun))
            made.append((version, scores, "already there" if is_there else "committed"))
    return made
