"""Asks a model about data sets of trajectories, and writes what it says."""

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import aiohttp

from configs import Config
from configs.models import Judge, Role
from storage import layout
from storage.records import ANNOTATION_SCHEMA
from storage.version_names import AnnotationsVersion, TrajectoriesVersion
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft
from storage.visible import Fleeting, described, visible
from tasks.annotate.asking import Asker, JudgeAsker, Question, RewardAsker, Said, TeacherAsker
from tasks.inference.api import InferenceError
from tasks.inference.beside import BesideModels
from tasks.inference.client import LOST, UNIX, Client, MalformedError, retrying
from tasks.inference.location import folder_of, identities, model_fingerprints

Rows = Iterable[dict[str, Any]]
Tell = Callable[[str], None]
_AT_ONCE = 32
"""Questions that a server has at the same time."""
_ROWS_PER_SHARD = 256
"""Annotations that a killed stage asks for again, at most: each shard is stored as soon as it is full."""
_ATTEMPTS = 9
"""Times that a question is sent, within about a minute: services refuse some that come too fast."""
_TRIES = 5
"""Number of attempts of the first question: it fails within seconds, because somebody waits for the answer."""
_LONGEST = 20_000  # characters of a question or an answer that are told


def asker(config: Config, role: Role) -> Asker:
    """Return what asks a model of a configuration.

    Raises:
        ValueError, StorageError: the model has no files, or no chat template.
    """
    if role == "teacher":
        return TeacherAsker()
    if role == "reward":
        return RewardAsker(config, folder_of(config, role))
    knobs = config.models.judge
    return JudgeAsker(config, None if isinstance(knobs, Judge) and knobs.name else folder_of(config, role))


async def _answer(
    role: Role, asks: Asker, models: BesideModels, client: Client, question: Question, attempts: int
) -> Said:
    """Return a model's answer. Servers of the flow's own are started again if they do not live any more."""

    async def repair(_: object) -> None:
        await asyncio.to_thread(models.repair, role)

    again = retrying(attempts, slow=client.url.startswith(UNIX)).copy(before_sleep=repair)
    try:
        return await again(asks.ask, client, question)
    except (MalformedError, aiohttp.ClientPayloadError) as error:  # it costs this question
        return Said(problem=described(error))
    except LOST as error:
        raise InferenceError(f"models.{role}: {client.url} does not answer: {described(error)}") from error


def ask_once(config: Config, role: Role, models: BesideModels | None, rows: Rows, tell: Tell) -> list[str]:
    """Ask a model one question about scripted episodes; return what may be wrong, but may be the script's fault.

    Without `models` only tell the question.

    Raises:
        InferenceError: the model does not take the question; or a server cannot be reached, or holds another model.
    """
    asks = asker(config, role)
    questions = [each for some in asks.questions(rows) for of_row in some.values() for each in of_row]
    findings = [f"models.{role}: {each.problem}" for each in questions if each.problem]

    async def ask(models: BesideModels, question: Question) -> Said:
        async with models.connect(role) as clients:
            return await _answer(role, asks, models, clients[0], question, _TRIES)

    for question in [each for each in questions if not each.problem][-1:]:
        tell(f"models.{role} {'is' if models else 'would be'} asked: {visible(str(question.content), _LONGEST)}")
        said = asyncio.run(ask(models, question)) if models else Said()
        if said.problem:
            raise InferenceError(f"models.{role} does not answer a question about a scripted episode: {said.problem}")
        if models and isinstance(asks, JudgeAsker):
            tell(f"models.{role} says: {visible(said.answer, _LONGEST)}")
            findings += filter(None, [asks.scorer.verdict(said.about(question, "")).reason])
    return findings


class Annotator:
    """Annotates trajectories with what one model says.

    Args:
        config: the configuration.
        role: of the model.

    Raises:
        ValueError, StorageError: see `asker`.
    """

    def __init__(self, config: Config, role: Role) -> None:
        self._role, self._model, self._asks = role, identities(config)[role], asker(config, role)
        self._fingerprint = model_fingerprints(config)[role]
        self._known = dict[Any, Said]()
        """Answers that may be asked for again, by the contents of questions."""
        self.columns = self._asks.columns
        """The columns of trajectories that it reads."""

    def version(self, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
        """Return the version of what it says: its name depends on the model, and on how that is asked."""
        text = json.dumps({"role": self._role, "model": self._fingerprint, **self._asks.how}, sort_keys=True)
        return layout.annotations(trajectories, hashlib.sha256(text.encode()).hexdigest()[:12])

    def annotate(self, models: BesideModels, rows: Rows, draft: Draft, progress: Tell) -> dict[str, Any]:
        """Ask about trajectories, but those whose shards a draft has taken over; add the answers; return the metrics.

        Raises:
            InferenceError: a server cannot be reached, refuses all questions or does not hold the model.
        """
        return asyncio.run(self._annotate(models, rows, draft, progress))

    async def _annotate(self, models: BesideModels, rows: Rows, draft: Draft, progress: Tell) -> dict[str, Any]:
        started, done = time.monotonic(), set(draft.notes)
        asked, problems = 0, list[str]()
        async with models.connect(self._role) as clients:
            with ShardWriter(draft, ANNOTATION_SCHEMA, _ROWS_PER_SHARD) as writer:
                for by_trajectory in self._asks.questions(row for row in rows if row["trajectory_id"] not in done):
                    questions = [question for of_it in by_trajectory.values() for question in of_it]
                    said, errors = await self._ask_all(models, clients, questions)
                    for name, of_it in by_trajectory.items():
                        if all(question in said for question in of_it):
                            writer.write_group([said[each].about(each, self._model) for each in of_it], name)
                    if errors:
                        writer.flush()
                        raise errors[0]
                    asked += len(questions)
                    problems += [each.problem for each in said.values() if each.problem]
                    seconds = time.monotonic() - started
                    progress(Fleeting(f"models.{self._role} has answered {asked} questions in {seconds:.0f} s"))
        distinct = len(self._known) if self._asks.repeats else asked
        numbers = {"asked": asked, "distinct": distinct, "problems": len(problems)}
        named = {"role": self._role, "model": self._model, **({"example": problems[0]} if problems else {})}
        return {**named, **numbers, "seconds": time.monotonic() - started}

    async def _ask_all(
        self, models: BesideModels, clients: Sequence[Client], questions: Sequence[Question]
    ) -> tuple[dict[Question, Said], list[BaseException]]:
        """Ask questions at the same time, of all servers in turn, and those with the same content once.

        An error of one question leaves the others their answers, which may have been paid.
        """
        limits = [asyncio.Semaphore(_AT_ONCE) for _ in clients]

        async def ask(question: Question, server: int) -> Said:
            async with limits[server]:
                return await _answer(self._role, self._asks, models, clients[server], question, _ATTEMPTS)

        new = {each.content: each for each in questions if not each.problem and each.content not in self._known}
        turns = itertools.cycle(range(len(clients)))
        said = await asyncio.gather(*(ask(each, next(turns)) for each in new.values()), return_exceptions=True)
        known = self._known if self._asks.repeats else dict[Any, Said]()
        known |= {content: each for content, each in zip(new, said, strict=True) if not isinstance(each, BaseException)}
        by_question = {each: Said(problem=each.problem) for each in questions if each.problem}
        by_question |= {each: known[each.content] for each in questions if each.content in known}
        return by_question, [each for each in said if isinstance(each, BaseException)]
