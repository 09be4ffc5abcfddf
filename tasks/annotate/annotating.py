"""Asks models beside the policy about data sets of trajectories, and writes what they say as annotations."""

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from configs import Config
from configs.models import Judge, Role
from storage import layout
from storage.records import ANNOTATION_SCHEMA, Annotation
from storage.version_names import AnnotationsVersion, TrajectoriesVersion
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft
from storage.visible import Fleeting, described, visible
from tasks.agents.chat import Chat, engine_ends, load_tokenizer
from tasks.agents.control import quoted
from tasks.inference.api import ContextLengthError, GenerationConfig, InferenceError, RefusedError, derive
from tasks.inference.beside import BesideModels
from tasks.inference.client import LOST, UNIX, Client, MalformedError, retrying
from tasks.inference.location import folder_of, identities, model_fingerprints
from tasks.score.by_model import JudgeScorer, messages_of
from tasks.score.scorers import OWN_COLUMNS, SCORERS
from tasks.score.scoring import batches
from tasks.score.verdict import Answer

Trajectories = Iterable[dict[str, Any]]
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
_BATCH_ROWS = 128
_OTHER_FIELDS = "set models.judge.request, say to {max_tokens: null, max_completion_tokens: 512, temperature: null}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a turn, or (turn -1) about a trajectory.

    Example: Question("demo/3/12+7/0", 0, "You grade an answer to a problem. …")
    """

    trajectory_id: str
    turn: int
    content: Any  # hashable; questions with the same content get the same answer
    problem: str = ""  # why it cannot be asked

    def answered(self, **fields: Any) -> Annotation:
        """Return what a model said, in fields of `Annotation`."""
        return Annotation(self.trajectory_id, self.turn, model="", **fields)


@lru_cache
def _chat_in(folder: Path) -> Chat:
    return Chat(load_tokenizer(folder), ends=engine_ends(folder))


class Asker:
    """Asks one model about trajectories, and annotates them with what it says.

    Args:
        config: the configuration.
        role: of the model.
    """

    columns: list[str]
    """The columns of trajectories that it reads."""
    how: dict[str, Any]
    """All that its answers depend on, besides the model and the trajectories."""
    repeats = True
    """Some questions are equal, so that answers are worth keeping."""

    def __init__(self, config: Config, role: Role) -> None:
        self._config, self.role = config, role
        self._known = dict[Any, Annotation]()
        """Answers that may be asked for again, by the contents of questions."""

    @cached_property
    def model(self) -> str:
        """The identity of the model, for which its files are read."""
        return identities(self._config)[self.role]

    def questions(self, rows: Trajectories) -> Iterator[dict[str, list[Question]]]:
        """Yield the questions about some trajectories at a time, by their ids."""
        raise NotImplementedError

    async def ask(self, client: Client, question: Question) -> Annotation:
        """Ask a server."""
        raise NotImplementedError

    async def answer(self, models: BesideModels, client: Client, question: Question, attempts: int) -> Annotation:
        """Return the model's answer. Servers of the flow's own are started again if they do not live any more."""

        async def repair(_: object) -> None:
            await asyncio.to_thread(models.repair, self.role)

        again = retrying(attempts, slow=client.url.startswith(UNIX)).copy(before_sleep=repair)
        try:
            return await again(self.ask, client, question)
        except (MalformedError, aiohttp.ClientPayloadError) as error:  # it costs this question
            return question.answered(problem=described(error))
        except LOST as error:
            raise InferenceError(f"models.{self.role}: {client.url} does not answer: {described(error)}") from error

    def version(self, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
        """Return the version of what it says: its name depends on the model, and on how that is asked."""
        model = model_fingerprints(self._config)[self.role]
        text = json.dumps({"role": self.role, "model": model, **self.how}, sort_keys=True)
        return layout.annotations(trajectories, hashlib.sha256(text.encode()).hexdigest()[:12])

    async def annotate(self, models: BesideModels, rows: Trajectories, draft: Draft, progress: Tell) -> dict[str, Any]:
        """Ask about trajectories, but those whose shards a draft has taken over; add the answers; return the metrics.

        Raises:
            InferenceError: a server cannot be reached, refuses all questions or does not hold the model.
        """
        started, done = time.monotonic(), set(draft.notes)
        asked, problems = 0, list[str]()
        async with models.connect(self.role) as clients:
            with ShardWriter(draft, ANNOTATION_SCHEMA, _ROWS_PER_SHARD) as writer:
                for by_trajectory in self.questions(row for row in rows if row["trajectory_id"] not in done):
                    questions = [question for of_it in by_trajectory.values() for question in of_it]
                    answers, errors = await self._ask_all(models, clients, questions)
                    for name, of_it in by_trajectory.items():
                        if all(question in answers for question in of_it):
                            writer.write_group([answers[each] for each in of_it], name)
                    if errors:
                        writer.flush()
                        raise errors[0]
                    asked += len(questions)
                    problems += [each.problem for each in answers.values() if each.problem]
                    seconds = time.monotonic() - started
                    progress(Fleeting(f"models.{self.role} has answered {asked} questions in {seconds:.0f} s"))
        distinct = len(self._known) if self.repeats else asked
        named = {"role": self.role, "model": self.model, **({"example": problems[0]} if problems else {})}
        numbers = {"asked": asked, "distinct": distinct, "problems": len(problems)}
        return {**named, **numbers, "seconds": time.monotonic() - started}

    async def _ask_all(
        self, models: BesideModels, clients: Sequence[Client], questions: Sequence[Question]
    ) -> tuple[dict[Question, Annotation], list[BaseException]]:
        """Ask questions at the same time, of all servers in turn, and those with the same content once.

        An error of one question leaves the others their answers, which may have been paid.
        """
        limits = [asyncio.Semaphore(_AT_ONCE) for _ in clients]

        async def ask(question: Question, server: int) -> Annotation:
            async with limits[server]:
                return await self.answer(models, clients[server], question, _ATTEMPTS)

        new = {each.content: each for each in questions if not each.problem and each.content not in self._known}
        turns = itertools.cycle(range(len(clients)))
        answers = await asyncio.gather(*(ask(each, next(turns)) for each in new.values()), return_exceptions=True)
        known = self._known if self.repeats else dict[Any, Annotation]()
        known |= {of: each for of, each in zip(new, answers, strict=True) if not isinstance(each, BaseException)}
        by_question = {each: each.answered(problem=each.problem) for each in questions if each.problem}
        by_question |= {each: known[each.content] for each in questions if each.content in known}
        named = {
            each: replace(of, trajectory_id=each.trajectory_id, turn=each.turn, model=self.model)
            for each, of in by_question.items()
        }
        return named, [each for each in answers if isinstance(each, BaseException)]


class _OfTurns(Asker):
    """Asks about the turns whose scorer asks this model."""

    def __init__(self, config: Config, role: Role) -> None:
        super().__init__(config, role)
        score, name = config.score, config.score.models[role]
        self._score, self._name = score, name
        self.scorer: Any = SCORERS.make(name, None, score.args.get(name, {}))
        sources = sorted(source for source, scorer in score.by_source.items() if scorer == name)
        others = sorted(set(score.by_source) - set(sources)) if "default" in sources else []
        self.columns = ["trajectory_id", "turns", "source", "ungraded", "answers", *OWN_COLUMNS]
        self.how = {"sources": sources, "others": others}

    def questions(self, rows: Trajectories) -> Iterator[dict[str, list[Question]]]:
        some = dict[str, list[Question]]()
        for answers in batches(rows, by_group=self._score.group, size=_BATCH_ROWS):
            for answer in answers:
                of_it = some.setdefault(answer.row["trajectory_id"], [])
                if not answer.ungraded and self._score.of(answer.row["source"]) == self._name:
                    of_it.append(self._question(answer))
            if len(some) >= _BATCH_ROWS:
                yield some
                some = {}
        yield some

    def _question(self, answer: Answer) -> Question:
        place = answer.row["trajectory_id"], answer.turn
        try:
            return Question(*place, self._content(answer))
        except Exception as error:  # noqa: BLE001 - a template raises anything, which costs only its turn
            return Question(*place, None, f"the question cannot be made: {described(error)}")

    def _content(self, answer: Answer) -> Hashable:
        raise NotImplementedError


class JudgeAsker(_OfTurns):
    """Asks a judge with its rubric, a service by its name. What it says has a seed of its own for each question."""

    scorer: JudgeScorer

    def __init__(self, config: Config) -> None:
        super().__init__(config, "judge")
        knobs = config.models.judge
        assert isinstance(knobs, Judge)
        self._service, self._fields, self._seed = knobs.name, knobs.request, config.run.seed
        self._chat = None if knobs.name else _chat_in(folder_of(config, "judge"))
        scorer = self.scorer
        self.how |= {"max_new_tokens": scorer.max_new_tokens, "temperature": scorer.temperature, **scorer.asked}
        self.how |= {"group": True} if config.score.group else {}

    def _content(self, answer: Answer) -> Hashable:
        question = self.scorer.question(answer)
        return question if self.scorer.temperature == 0 else (question, answer.row["trajectory_id"], answer.turn)

    async def ask(self, client: Client, question: Question) -> Annotation:
        prompt = question.content if isinstance(question.content, str) else question.content[0]
        scorer, seed = self.scorer, derive(self._seed, question.trajectory_id, question.turn, "judge")
        messages = [{"role": "user", "content": prompt}]
        if not self._chat:
            assert self._service
            fields = {"max_tokens": scorer.max_new_tokens, "temperature": scorer.temperature, "seed": seed}
            try:
                text, end = await client.chat(self._service, messages, fields | self._fields)
            except RefusedError as error:
                problem = f"{error}. If it does not know a field, {_OTHER_FIELDS}"
                return question.answered(prompt=prompt, problem=problem)
        else:
            ends, limit = self._chat.stop_token_ids, scorer.max_new_tokens
            gconfig = GenerationConfig(temperature=scorer.temperature, max_new_tokens=limit, stop_token_ids=ends)
            try:
                prompt_ids = self._chat.prompt(quoted(messages))
                (completion,) = await client.generate(prompt_ids, gconfig, seed)
            except ContextLengthError as error:
                problem = str(error).replace("inference.", "models.judge.")
                return question.answered(prompt=prompt, problem=problem)
            text, end = self._chat.decode(completion.token_ids, prompt_ids), completion.finish_reason
        cut = f"it was cut ({end}): raise score.args.judge.max_new_tokens"
        problem = cut if end in ("length", "content_filter") else ""
        return question.answered(prompt=prompt, answer=text, problem=problem)


class RewardAsker(_OfTurns):
    """Asks a reward model about the conversation up to each turn."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, "reward")
        assert config.models.reward
        self._chat, self._most = _chat_in(folder_of(config, "reward")), config.models.reward.max_model_len

    def _content(self, answer: Answer) -> Hashable:
        return tuple(self._chat.whole(messages_of(answer)))

    async def ask(self, client: Client, question: Question) -> Annotation:
        ids = list(question.content)
        if len(ids) > self._most:
            problem = f"{len(ids)} tokens are more than models.reward.max_model_len={self._most}"
            return question.answered(problem=problem)
        return question.answered(value=await client.pooled(ids))


class TeacherAsker(Asker):
    """Asks a teacher for the logprob of each token of each sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, "teacher")
        self.columns = ["trajectory_id", "token_ids", "sequence_starts"]
        self.how, self.repeats = {}, False

    def questions(self, rows: Trajectories) -> Iterator[dict[str, list[Question]]]:
        stream = iter(rows)
        while batch := list(itertools.islice(stream, _BATCH_ROWS)):
            yield {row["trajectory_id"]: [self._question(row)] for row in batch}

    def _question(self, row: dict[str, Any]) -> Question:
        cuts = [*row.get("sequence_starts", [0]), len(row["token_ids"])]
        return Question(row["trajectory_id"], -1, tuple(tuple(row["token_ids"][a:b]) for a, b in pairwise(cuts)))

    async def ask(self, client: Client, question: Question) -> Annotation:
        logprobs = list[float]()
        for sequence in filter(None, question.content):
            logprobs += [0.0, *(await client.prompt_logprobs(list(sequence)) if len(sequence) > 1 else [])]
        return question.answered(logprobs=logprobs)


def asker(config: Config, role: Role) -> Asker:
    """Return what asks a model of a configuration.

    Raises:
        ValueError, StorageError: the model has no files, or no chat template.
    """
    kinds: dict[Role, Callable[[Config], Asker]] = {"judge": JudgeAsker, "reward": RewardAsker, "teacher": TeacherAsker}
    return kinds[role](config)


def ask_once(config: Config, role: Role, models: BesideModels | None, rows: Trajectories, tell: Tell) -> list[str]:
    """Ask a model one question about scripted episodes; return what may be wrong, but may be the script's fault.

    Without `models` only tell the question.

    Raises:
        InferenceError: the model does not take the question; or a server cannot be reached, or holds another model.
    """
    asks = asker(config, role)
    questions = [each for some in asks.questions(rows) for of_row in some.values() for each in of_row]
    findings = [f"models.{role}: {each.problem}" for each in questions if each.problem]

    async def ask(models: BesideModels, question: Question) -> Annotation:
        async with models.connect(role) as clients:
            return await asks.answer(models, clients[0], question, _TRIES)

    for question in [each for each in questions if not each.problem][-1:]:
        tell(f"models.{role} {'is' if models else 'would be'} asked: {visible(str(question.content), _LONGEST)}")
        reply = asyncio.run(ask(models, question)) if models else question.answered()
        if reply.problem:
            raise InferenceError(f"models.{role} does not answer a question about a scripted episode: {reply.problem}")
        if models and isinstance(asks, JudgeAsker):
            tell(f"models.{role} says: {visible(reply.answer, _LONGEST)}")
            findings += filter(None, [asks.scorer.verdict(reply).reason])
    return findings
