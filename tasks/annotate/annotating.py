"""Asks a model about a data set of trajectories, and writes what it says."""

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import aiohttp

from configs import Config
from configs.models import Judge, Role
from storage import layout
from storage.records import ANNOTATION_SCHEMA
from storage.version_names import AnnotationsVersion, TrajectoriesVersion
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft
from storage.visible import Fleeting
from tasks.annotate.asking import Asker, JudgeAsker, Question, RewardAsker, Said, TeacherAsker
from tasks.inference.api import InferenceError
from tasks.inference.beside import BesideModels
from tasks.inference.client import Client, retrying
from tasks.inference.location import folder_of, identities

_AT_ONCE = 32
"""Questions that a server has at the same time."""
_ROWS_PER_SHARD = 256
"""Annotations that a killed stage asks for again, at most: each shard is stored as soon as it is full."""
_ATTEMPTS = 9
"""Times that a question is sent, within about a minute: services refuse some that come too fast."""


def asker(config: Config, role: Role) -> Asker:
    """Return what asks a model of a configuration."""
    if role == "teacher":
        return TeacherAsker(config)
    if role == "reward":
        return RewardAsker(config, folder_of(config, role))
    knobs = config.models.judge
    return JudgeAsker(config, None if isinstance(knobs, Judge) and knobs.name else folder_of(config, role))


def version_of(config: Config, role: Role, asks: Asker, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
    """Return the version of what a model says about trajectories: it depends on the model, and on how it is asked."""
    text = json.dumps({"role": role, "model": identities(config)[role], **asks.how}, sort_keys=True)
    return layout.annotations(trajectories, hashlib.sha256(text.encode()).hexdigest()[:12])


def annotate_rows(
    role: Role,
    model: str,
    asks: Asker,
    models: BesideModels,
    rows: Iterable[dict[str, Any]],
    draft: Draft,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Ask a model about trajectories, add its answers to a draft, and return the metrics.

    Raises:
        InferenceError: a server cannot be reached, refuses a question or does not hold the model.
    """
    return asyncio.run(_annotate(role, model, asks, models, rows, draft, progress))


async def _annotate(
    role: Role,
    model: str,
    asks: Asker,
    models: BesideModels,
    rows: Iterable[dict[str, Any]],
    draft: Draft,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    started, done = time.monotonic(), {name for note in draft.notes for name in note}
    asked = distinct = problems = 0
    example = ""
    async with models.connect(role) as clients:
        with ShardWriter(draft, ANNOTATION_SCHEMA, _ROWS_PER_SHARD) as writer:
            for ids, questions in asks.questions(row for row in rows if row["trajectory_id"] not in done):
                said = await _ask_all(role, asks, clients, questions)
                annotations = [said[question.content].about(question, model) for question in questions]
                writer.write_group(annotations, ids)
                asked, distinct = asked + len(questions), distinct + len(said)
                failed = [annotation.problem for annotation in annotations if annotation.problem]
                problems, example = problems + len(failed), example or next(iter(failed), "")
                seconds = time.monotonic() - started
                progress(Fleeting(f"models.{role} has answered {asked} questions in {seconds:.0f} s"))
    numbers = {"asked": asked, "distinct": distinct, "problems": problems, "seconds": time.monotonic() - started}
    return {"role": role, "model": model, **numbers, **({"example": example} if example else {})}


async def _ask_all(
    role: Role, asks: Asker, clients: Sequence[Client], questions: Sequence[Question]
) -> dict[Hashable, Said]:
    """Ask distinct questions at the same time, of all servers in turn; return what was said, by their contents."""
    limits = [asyncio.Semaphore(_AT_ONCE) for _ in clients]

    async def ask(question: Question, server: int) -> Said:
        async with limits[server]:
            try:
                return await retrying(_ATTEMPTS)(asks.ask, clients[server], question)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                url = clients[server].url
                raise InferenceError(f"models.{role}: {url} does not answer: {type(error).__name__} {error}") from error

    distinct = {question.content: question for question in questions}
    turns = itertools.cycle(range(len(clients)))
    said = await asyncio.gather(*(ask(question, next(turns)) for question in distinct.values()))
    return dict(zip(distinct, said, strict=True))
