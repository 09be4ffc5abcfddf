"""`import`: make data sets of the dumps of another program.

The files are read twice. The first reading finds bad rows, collects the problems, whose set the rows name, and sees
what rows lack. A version that exists is not made again, so the same command continues after an interruption.
"""

import argparse
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from configs import Config, load
from storage import layout
from storage.commands.program import Output, table
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.version_names import EvaluationVersion, ProblemsVersion, ScoresVersion, TrajectoriesVersion
from storage.versions import datasets, manifests
from storage.versions.datasets import ShardWriter, write_rows
from storage.versions.drafts import Draft, Provenance
from tasks.audit.checks import LACKED, all_checks
from tasks.audit.importing.formats import FORMATS
from tasks.audit.importing.rollout import Rollout
from tasks.audit.importing.trajectories import Problems, lacking, to_trajectory, with_tokens
from tasks.problems import fingerprint
from tasks.problems.problem_set import REPORTED, BadRow, ProblemError, RowError, Where
from tasks.problems.sources import find, read_jsonl, read_parquet

if TYPE_CHECKING:
    from tasks.agents.chat import Chat

_OVERRIDE = re.compile(r"[a-z_][a-z0-9_.]*=")
_ROWS_PER_SHARD = 5_000
IMPORTED = "imported"
"""The metric of a run that holds another program's trajectories: their format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE|key=value",
        help="JSONL or Parquet files (.parquet), URIs, or patterns such as 'dumps/*.jsonl'; with an equals sign: a dotted "
        "override of the configuration, such as score.type=environment",
    )
    parser.add_argument("--format", required=True, choices=FORMATS, help="the program that wrote the files")
    parser.add_argument("--name", required=True, help="name of the run that holds the data sets")
    parser.add_argument("--tokenizer", default="", help="folder of the model's tokenizer, which makes and shows tokens")
    parser.add_argument(
        "--evaluation",
        default="",
        metavar="SET",
        help="the rows are evaluations of the run's policies on a set of this name",
    )
    parser.add_argument(
        "--reward", action="append", default=[], help="trl: a column of rewards; default: all columns of float numbers"
    )
    parser.add_argument(
        "--config", default="demo", help="configuration whose score, reward and audit count; default demo"
    )


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Import the files, score the rows and say what they lack.

    Raises:
        ValueError: a file cannot be read, too many rows are bad, or the run holds something else.
        StorageError: the store does not answer, or another process writes the run.
    """
    overrides = [each for each in arguments.files if _OVERRIDE.match(each) and not Path(each).exists()]
    fixed = [f"run.name={arguments.name}", f"storage.root={store.root}", f"storage.cache={arguments.cache}"]
    config = load(arguments.config, [*overrides, *fixed])
    dump = Dump(
        [each for each in arguments.files if each not in overrides],
        arguments.format,
        arguments.reward,
        _load_chat(arguments.tokenizer),
    )
    survey = _survey(dump, config.problems.max_bad_share)
    if any(lacks["golds"] for lacks in survey.lacks.values()) and not any(
        each.startswith("score.type=") for each in overrides
    ):
        config = load(arguments.config, [*overrides, *fixed, "score.type=environment"])
    with Lease(store, config.run.name, label="import") as lease:
        provenance = Provenance(config=config.model_dump(mode="json"), fence=lease)
        _commit_run(store, config.run.name, dump, provenance)
        problem_set = layout.problems(fingerprint(survey.problems.by_id.values()))
        if not manifests.committed(store, problem_set):
            with Draft(store, problem_set, "problems") as draft:
                write_rows(draft, PROBLEM_SCHEMA, survey.problems.by_id.values(), _ROWS_PER_SHARD)
                draft.commit(provenance, [], {"problems": len(survey.problems.by_id), "source": {"kind": dump.format}})
        versions = _commit_rollouts(store, dump, survey, config, provenance, problem_set, arguments.evaluation)
        scores = _commit_scores(store, versions, config, provenance, Path(arguments.cache))
    said, rows = list(survey.report(config)), list(zip(versions, scores, strict=True))
    data = {"problems": problem_set, "data_sets": rows, "rows": survey.rows, "bad_rows": len(survey.bad), "says": said}
    return Output(data, [table(["data set", "scores"], rows, f"{survey.rows:,} rows of {dump.format}"), *said])


@dataclass(frozen=True, slots=True)
class Dump:
    """Files of one format, and how they are read."""

    paths: Sequence[str]
    format: str
    rewards: Sequence[str]  # names of columns
    chat: "Chat | None"  # of the tokenizer, if one was given

    def read(self) -> Iterator[tuple[Where, Rollout | RowError, str]]:
        """Yield the place of each row, its episode or what is wrong with it, and the row as a text.

        Raises:
            ProblemError: a file cannot be read.
        """
        for path in self.paths:
            for name, file in find(path):
                is_parquet = file.endswith((".parquet", ".pq"))
                for line, row in read_parquet(file) if is_parquet else read_jsonl(file):
                    yield Where(line, name or PurePosixPath(file).name), self._rollout(row), repr(row)

    def _rollout(self, row: "dict[str, object] | RowError") -> Rollout | RowError:
        try:
            if isinstance(row, RowError):
                return row
            rollout = FORMATS[self.format](row, self.rewards)
            return with_tokens(rollout, self.chat) if self.chat else rollout
        except RowError as error:
            return error


@dataclass(slots=True)
class Survey:
    """What one reading of a dump finds."""

    problems: Problems = field(default_factory=Problems)
    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)  # of rewards
    lacks: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # rows that lack something
    digests: dict[int, str] = field(default_factory=lambda: defaultdict(str))  # of the rows. Both by step

    def add(self, where: Where, rollout: Rollout | RowError, row: str) -> Problem | None:
        """Note a row; return the problem of its episode, or None for a bad row."""
        self.rows += 1
        try:
            if isinstance(rollout, RowError):
                raise rollout
            problem = self.problems.of(rollout)
        except RowError as error:
            self.bad.append(BadRow(where, str(error)))
            return None
        self.lacks[rollout.step].update(lacking(rollout))
        self.parts.update(rollout.parts)
        self.digests[rollout.step] = hashlib.sha256(f"{self.digests[rollout.step]}{row}".encode()).hexdigest()[:12]
        return problem

    def report(self, config: Config) -> Iterator[str]:
        """Yield what a person must know: bad rows, what is lacking and its consequence, and how rows were scored."""
        for row in self.bad[:REPORTED]:
            yield f"bad row, left out: {row.where}: {row.reason}"
        if len(self.bad) > REPORTED:
            yield f"{len(self.bad) - REPORTED} more bad rows were left out"
        good = self.rows - len(self.bad)
        for name, count in sorted(sum(self.lacks.values(), Counter[str]()).items()):
            skipped = [check.name for check in all_checks().values() if name in check.needs.split()]
            share = "" if count == good else f" in {count:,} of {good:,} rows"
            what = f": skipped in audits: {', '.join(skipped)}" if skipped else ""
            yield f"no {LACKED[name]}{share}{what}"
        if self.parts:
            yield f"parts of the rewards: {', '.join(sorted(self.parts))}"
        yield f"scored by {config.score.type}; others: python -m flows.score … run.name={config.run.name} score.type=…"


def _survey(dump: Dump, max_bad_share: float) -> Survey:
    survey = Survey()
    for where, rollout, digest in dump.read():
        survey.add(where, rollout, digest)
    named = " ".join(dump.paths)
    if not survey.rows:
        raise ProblemError(f"{named} holds no rows: check that the files are the right ones and complete")
    if not survey.digests or len(survey.bad) > max_bad_share * survey.rows:
        shown = "".join(f"\n  {row.where}: {row.reason}" for row in survey.bad[:REPORTED])
        raise ProblemError(
            f"{named}: {len(survey.bad)} of {survey.rows} rows are bad (problems.max_bad_share={max_bad_share:g}): check "
            f"that --format={dump.format} is right, or allow more{shown}"
        )
    return survey


def _load_chat(folder: str) -> "Chat | None":
    if not folder:
        return None
    from tasks.agents.chat import Chat, load_tokenizer

    try:
        return Chat(load_tokenizer(Path(folder)))
    except Exception as error:  # the library raises no narrower error
        raise ValueError(f"--tokenizer={folder}: it cannot be used: {error}") from error


def _commit_run(store: Store, name: str, dump: Dump, provenance: Provenance) -> None:
    """Commit what a run of this name holds, with the tokenizer; refuse a run that holds something else.

    Raises:
        ValueError: the run was trained, or has other tokens.
    """
    kind, version = {"format": dump.format, "rewards": sorted(dump.rewards), "tokenizer": ""}, layout.run(name)
    if dump.chat:
        words = [sorted(dump.chat.tokenizer.get_vocab().items()), dump.chat.tokenizer.chat_template]
        kind["tokenizer"] = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
    if there := manifests.find(store, version):
        if there.metrics.get(IMPORTED) != kind:
            held = there.metrics.get(IMPORTED) or "trajectories of its own"
            raise ValueError(f"the run {name} exists and holds {held}, not {kind}: give another --name")
        return
    with Draft(store, version, "run") as draft:
        if dump.chat:
            dump.chat.tokenizer.save_pretrained(draft.scratch / "model")
            draft.add_folder(draft.scratch / "model", "model")
        draft.commit(provenance, [], {IMPORTED: kind})


def _commit_rollouts(
    store: Store,
    dump: Dump,
    survey: Survey,
    config: Config,
    provenance: Provenance,
    problem_set: ProblemsVersion,
    evaluated: str,
) -> list[TrajectoriesVersion]:
    """Write and commit a data set for each step, unless it exists; return their versions.

    Raises:
        ValueError: a data set of this step has other rows, or the files have changed since they were surveyed.
    """
    name, kind = config.run.name, "evaluation" if evaluated else "trajectories"
    name, again, samples, waiting = config.run.name, Survey(), Counter[tuple[int, str]](), 0
    versions = {step: _version(name, step, evaluated, digest) for step, digest in survey.digests.items()}
    missing = {step for step, version in versions.items() if not _holds(store, version, survey.digests[step])}
    with ExitStack() as stack:
        writers = dict[int, ShardWriter]()
        drafts = dict[int, Draft]()
        for where, rollout, digest in dump.read():
            problem = again.add(where, rollout, digest)
            if problem is None or isinstance(rollout, RowError) or rollout.step not in missing:
                continue
            sample = samples[rollout.step, problem.problem_id]
            samples[rollout.step, problem.problem_id] += 1
            record = _record(
                name, rollout.step, problem, sample, problem_set, {"format": dump.format, "row": str(where)}
            )
            if rollout.step not in writers:
                kind: manifests.Kind = "evaluation" if evaluated else "trajectories"
                draft = drafts[rollout.step] = stack.enter_context(Draft(store, versions[rollout.step], kind))
                writers[rollout.step] = ShardWriter(draft, TRAJECTORY_SCHEMA, _ROWS_PER_SHARD)
            writers[rollout.step].write(to_trajectory(rollout, record, dump.chat))
            if (waiting := waiting + 1) % _ROWS_PER_SHARD == 0:
                for writer in writers.values():
                    writer.flush()
        if again != survey:
            raise ValueError(f"{' '.join(dump.paths)} changed while being read: import again when they are complete")
        for step, writer in sorted(writers.items()):
            writer.flush()
            metrics = {"digest": survey.digests[step], "lacks": survey.lacks[step], "bad_rows": len(survey.bad)}
            drafts[step].commit(provenance, [problem_set], metrics)
    return [versions[step] for step in sorted(versions)]


def _version(run: str, step: int, evaluated: str, digest: str) -> TrajectoriesVersion:
    policy = layout.checkpoint(run, step)
    return layout.evaluation(policy, evaluated, f"sampled-{digest}") if evaluated else layout.trajectories(run, step)


def _holds(store: Store, version: TrajectoriesVersion, digest: str) -> bool:
    """Return whether a data set is committed.

    Raises:
        ValueError: it has other rows.
    """
    there = manifests.find(store, version)
    if there and there.metrics.get("digest") != digest:
        raise ValueError(f"{version} exists and has other rows: give another --name")
    return there is not None


def _record(
    run: str, step: int, problem: Problem, sample: int, problem_set: ProblemsVersion, origin: dict[str, str]
) -> Trajectory:
    """Return an episode without its turns."""
    return Trajectory(
        trajectory_id=f"{run}/{step:06d}/{problem.problem_id}/{sample}",
        run=run,
        iteration=step,
        problem_id=problem.problem_id,
        sample=sample,
        status="completed",
        reason="",
        token_ids=[],
        action_mask=[],
        logprobs=[],
        versions=[],
        turns=[],
        turn_discount=1.0,
        prompt=problem.prompt,
        solutions=problem.solutions,
        problem_set=problem_set,
        policy="",
        policy_version=-1,
        sampling="{}",
        agent=IMPORTED,
        agent_args=json.dumps(origin),
        environment=IMPORTED,
        environment_args="{}",
        seed=0,
        started_at=0.0,
        latency_s=0.0,
        source=problem.source,
        metadata=problem.metadata,
    )


def _commit_scores(
    store: Store, versions: Sequence[TrajectoriesVersion], config: Config, provenance: Provenance, cache: Path
) -> list[ScoresVersion]:
    """Score the data sets with the scorers of the configuration; return the versions of the scores."""
    from tasks.score.scorers import Scorers
    from tasks.score.scoring import metrics_of, score_rows, scorer_fingerprint
    from tasks.score.verifier import Verifier

    settings, scores = config.score, list[ScoresVersion]()
    fingerprint_ = scorer_fingerprint(settings)
    with Verifier(settings.workers, settings.timeout_s, reading=settings.reading) as verifier:
        scorers = Scorers(settings, verifier)
        for version in versions:
            target = layout.scores(config.run.name, version.number, fingerprint_)
            if isinstance(version, EvaluationVersion):
                target = layout.evaluation_scores(version, fingerprint_)
            scores.append(target)
            if not manifests.committed(store, target):
                with Draft(store, target, "scores") as draft:
                    begun = time.monotonic()
                    rows = datasets.rows(store, version, cache, scorers.columns)
                    grades = score_rows(rows, scorers, draft, _ROWS_PER_SHARD)
                    draft.commit(provenance, [version], metrics_of(grades, settings, time.monotonic() - begun))
    return scores
