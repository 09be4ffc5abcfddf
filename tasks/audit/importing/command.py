"""`import`: make data sets of the dumps of another program, score them, and say what they lack.

A version that exists is not made again, so the same command continues after an interruption.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from configs import Config, load
from storage import layout
from storage.commands.program import Output, table
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, TRAJECTORY_SCHEMA, Trajectory
from storage.version_names import EvaluationVersion, ScoresVersion, TrajectoriesVersion
from storage.versions import datasets, manifests
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `import`."""
    files = (
        "JSONL or Parquet files, URIs or patterns such as 'dumps/*.jsonl'; with an equals sign: score.type=environment"
    )
    parser.add_argument("files", nargs="+", metavar="FILE|key=value", help=files)
    parser.add_argument("--format", required=True, choices=FORMATS, help="the program that wrote the files")
    parser.add_argument("--name", required=True, help="name of the run that will hold the data sets")
    parser.add_argument("--tokenizer", default="", help="folder of the model's tokenizer, which makes and shows tokens")
    parser.add_argument("--evaluation", default="", metavar="SET", help="these are evaluations on a set of this name")
    parser.add_argument(
        "--config", default="demo", help="configuration; its score, reward and audit count; default demo"
    )


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Import and score the files.

    Raises:
        ValueError: a file cannot be read, too many rows are bad, or the run holds something else.
        StorageError: the store does not answer, or another process writes the run.
    """
    if not re.fullmatch(r"[\w.-]*", arguments.evaluation, re.ASCII):
        raise ValueError(f"--evaluation={arguments.evaluation}: give a name of letters, digits, points and dashes")
    overrides = [each for each in arguments.files if _OVERRIDE.match(each) and not Path(each).exists()]
    overrides += [f"run.name={arguments.name}", f"storage.root={store.root}", f"storage.cache={arguments.cache}"]
    config, chat = load(arguments.config, overrides), _load_chat(arguments.tokenizer)
    paths = [each for each in arguments.files if each not in overrides]
    dump = read_dump(paths, arguments.format, chat, config.problems.max_bad_share)
    if dump.lacks["golds"] and not any(each.startswith("score.type=") for each in overrides):
        config = load(arguments.config, [*overrides, "score.type=environment"])
    with Lease(store, config.run.name, label="import") as lease:
        provenance = Provenance(config=config.model_dump(mode="json"), fence=lease)
        versions = _commit(store, dump, provenance, config.run.name, arguments.evaluation)
        scores = _score(store, versions, config, provenance, Path(arguments.cache))
    said, rows = list(_report(dump, config)), list(zip(versions, scores, strict=True))
    title = f"{sum(map(len, dump.by_step.values())):,} episodes of {len(dump.problems.by_id):,} problems"
    return Output({"data_sets": rows, "says": said}, [table(["data set", "scores"], rows, title), *said])


@dataclass(slots=True)
class Dump:
    """The episodes of the files of one format."""

    format: str
    chat: "Chat | None"  # of the tokenizer, if one was given
    by_step: dict[int, list[tuple[Where, Rollout]]] = field(default_factory=lambda: defaultdict(list))
    problems: Problems = field(default_factory=Problems)
    bad: list[BadRow] = field(default_factory=list)
    lacks: Counter[str] = field(default_factory=Counter)  # numbers of episodes


def read_dump(paths: Sequence[str], form: str, chat: "Chat | None", max_bad_share: float) -> Dump:
    """Read the files of one format.

    Raises:
        ProblemError: a file cannot be read, has no good row, or a larger share of bad ones than `max_bad_share`.
    """
    dump, total, named = Dump(form, chat), 0, ", ".join(paths)
    for name, path in (file for pattern in paths for file in find(pattern)):
        for line, row in read_parquet(path) if path.endswith((".parquet", ".pq")) else read_jsonl(path):
            total, where = total + 1, Where(line, name or PurePosixPath(path).name)
            try:
                rollout = read_row(row, form, chat)
                dump.problems.of(rollout)
            except RowError as error:
                dump.bad.append(BadRow(where, str(error)))
                continue
            dump.by_step[rollout.step].append((where, rollout))
            dump.lacks.update(lacking(rollout))
    if not total:
        raise ProblemError(f"{named} holds no rows: check that the files are the right ones and complete")
    if not dump.by_step or len(dump.bad) > max_bad_share * total:
        raise ProblemError(
            f"{named}: {len(dump.bad)} of {total} rows are bad (problems.max_bad_share={max_bad_share:g}): check that "
            f"--format={form} is right\n  " + "\n  ".join(_bad_rows(dump))
        )
    return dump


def read_row(row: dict[str, Any] | RowError, form: str, chat: "Chat | None") -> Rollout:
    """Read a row. Raises RowError: it is not as the format says, or the chat template refuses the conversation."""
    if isinstance(row, RowError):
        raise row
    try:
        rollout = Rollout.model_validate(FORMATS[form](row))
        rollout.model_dump_json()  # an error, if a text has half a surrogate pair, which UTF-8 cannot store
        return with_tokens(rollout, chat) if chat else rollout
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]]
        raise RowError("; ".join(wrong).lstrip(": ")) from None
    except ValueError as error:
        raise RowError(str(error)) from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise RowError(f"a value has another type than in {form}: {error}") from None


def _bad_rows(dump: Dump) -> Iterator[str]:
    yield from (f"{row.where}: {row.reason}" for row in dump.bad[:REPORTED])
    if len(dump.bad) > REPORTED:
        yield f"{len(dump.bad) - REPORTED} more"


def _report(dump: Dump, config: Config) -> Iterator[str]:
    """Yield what a person must know: bad rows, what is lacking and its consequences, and how rewards were read."""
    yield from (f"bad row, left out: {line}" for line in _bad_rows(dump))
    episodes = [rollout for rollouts in dump.by_step.values() for _, rollout in rollouts]
    for what, count in sorted(dump.lacks.items()):
        checks = [check.name for check in all_checks().values() if what in check.needs.split()]
        share = "" if count == len(episodes) else f" in {count:,} of {len(episodes):,} episodes"
        yield f"no {LACKED[what]}{share}{': audits skip ' if checks else ''}{', '.join(checks)}"
    if parts := sorted({name for rollout in episodes for name in rollout.parts}):
        yield f"parts of the rewards: {', '.join(parts)}"
    yield f"scored by {config.score.type}; score again: python -m flows.score … run.name={config.run.name} score.type=…"


def _load_chat(folder: str) -> "Chat | None":
    if not folder:
        return None
    from tasks.agents.chat import Chat, load_tokenizer

    try:
        return Chat(load_tokenizer(Path(folder)))
    except Exception as error:  # the library raises no narrower error
        raise ValueError(
            f"--tokenizer={folder}: give a folder with a tokenizer and a chat template: {error}"
        ) from error


def _commit(store: Store, dump: Dump, provenance: Provenance, name: str, evaluated: str) -> list[TrajectoriesVersion]:
    """Commit the run with the tokenizer, the problem set, and a data set for each step, as far as they do not exist.

    Raises:
        ValueError: the run holds something else, or a data set other rows.
    """
    holds, versions = {"format": dump.format, "tokenizer": bool(dump.chat)}, list[TrajectoriesVersion]()
    if there := manifests.find(store, layout.run(name)):
        if there.imported != holds:
            raise ValueError(f"the run {name} exists and holds something else: give another --name")
    else:
        with Draft(store, layout.run(name), "run") as draft:
            if dump.chat:
                dump.chat.tokenizer.save_pretrained(draft.scratch / "model")
                draft.add_folder(draft.scratch / "model", "model")
            draft.commit(provenance, [], {"imported": holds})
    problem_set = layout.problems(fingerprint(dump.problems.by_id.values()))
    if not manifests.committed(store, problem_set):
        with Draft(store, problem_set, "problems") as draft:
            datasets.write_rows(draft, PROBLEM_SCHEMA, dump.problems.by_id.values(), _ROWS_PER_SHARD)
            draft.commit(provenance, [], {"problems": len(dump.problems.by_id), "source": {"kind": dump.format}})
    for step, rollouts in sorted(dump.by_step.items()):
        rows = list(_trajectories(dump, rollouts, name, problem_set))
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
        version: TrajectoriesVersion = layout.trajectories(name, step)
        if evaluated:
            version = layout.evaluation(layout.checkpoint(name, step), evaluated, f"sampled-{digest}")
        versions.append(version)
        if there := manifests.find(store, version):
            if there.metrics.get("digest") != digest:
                raise ValueError(f"{version} exists and has other rows: give another --name")
            continue
        with Draft(store, version, "evaluation" if evaluated else "trajectories") as draft:
            datasets.write_rows(draft, TRAJECTORY_SCHEMA, rows, _ROWS_PER_SHARD)
            lacks = Counter(what for _, rollout in rollouts for what in lacking(rollout))
            draft.commit(provenance, [problem_set], {"digest": digest, "lacks": lacks, "trajectories": len(rows)})
    return versions


def _trajectories(
    dump: Dump, rollouts: Sequence[tuple[Where, Rollout]], name: str, problem_set: str
) -> Iterator[Trajectory]:
    """Yield the trajectories of a step."""
    samples = Counter[str]()
    unknown: dict[str, Any] = {"policy": "", "policy_version": -1, "seed": 0, "started_at": 0.0, "latency_s": 0.0}
    unknown |= {column: [] for column in ("token_ids", "action_mask", "logprobs", "versions", "turns")}
    unknown |= {"status": "completed", "reason": "", "sampling": "{}", "environment_args": "{}", "turn_discount": 1.0}
    for where, rollout in rollouts:
        problem = dump.problems.of(rollout)
        sample, origin = samples[problem.problem_id], {"format": dump.format, "row": str(where)}
        samples[problem.problem_id] += 1
        record = Trajectory(
            trajectory_id=f"{name}/{rollout.step:06d}/{problem.problem_id}/{sample}",
            run=name,
            iteration=rollout.step,
            sample=sample,
            problem_set=problem_set,
            agent="imported",
            agent_args=json.dumps(origin),
            environment="imported",
            **dataclasses.asdict(problem),
            **unknown,
        )
        yield to_trajectory(rollout, record, dump.chat)


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
