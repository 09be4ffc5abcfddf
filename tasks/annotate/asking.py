"""Questions to models beside the policy, and how their answers become annotations."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from configs import Config
from configs.models import Judge, Role
from storage.records import Annotation
from storage.visible import described
from tasks.agents.chat import Chat, engine_ends, load_tokenizer
from tasks.agents.control import quoted
from tasks.inference.api import ContextLengthError, GenerationConfig, RefusedError
from tasks.inference.client import Client
from tasks.score.by_model import JudgeScorer, messages_of
from tasks.score.interface import Answer
from tasks.score.scorers import OWN_COLUMNS, SCORERS
from tasks.score.scoring import batches
from tasks.seeds import derive

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


@dataclass(frozen=True, slots=True)
class Said:
    """The answer of a model to a question; see `Annotation` for the fields."""

    prompt: str = ""
    answer: str = ""
    value: float = 0.0
    logprobs: Sequence[float] = ()
    problem: str = ""

    def about(self, question: Question, model: str) -> Annotation:
        """Return it as the annotation of a question by the model with this identity."""
        place = question.trajectory_id, question.turn
        return Annotation(*place, model, self.prompt, self.answer, self.value, list(self.logprobs), self.problem)


@lru_cache
def _chat_in(folder: Path) -> Chat:
    return Chat(load_tokenizer(folder), ends=engine_ends(folder))


class Asker(Protocol):
    """Asks one model."""

    columns: list[str]
    """The columns of trajectories that it reads."""
    how: dict[str, Any]
    """All that its answers depend on, besides the model and the trajectories."""

    repeats: bool
    """Whether some questions are equal, so that answers are worth keeping."""

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, list[Question]]]:
        """Yield the questions about some trajectories at a time, by their ids."""

    async def ask(self, client: Client, question: Question) -> Said:
        """Ask a server."""


class _OfTurns:
    """Asks about the turns whose scorer asks this model."""

    def __init__(self, config: Config, role: Role) -> None:
        score, name = config.score, config.score.models[role]
        self._score, self._name = score, name
        self.scorer: Any = SCORERS.make(name, None, score.args.get(name, {}))
        sources = sorted(source for source, scorer in score.by_source.items() if scorer == name)
        others = sorted(set(score.by_source) - set(sources)) if "default" in sources else []
        self.columns = ["trajectory_id", "turns", "source", "ungraded", "answers", *OWN_COLUMNS]
        self.how: dict[str, Any] = {"sources": sources, "others": others}

    repeats = True

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, list[Question]]]:
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
    """Asks a judge with its rubric. What it says has a seed of its own for each question.

    Args:
        config: the configuration.
        folder: of the model; None: a service, which is asked by the judge's name.
    """

    scorer: JudgeScorer

    def __init__(self, config: Config, folder: Path | None) -> None:
        super().__init__(config, "judge")
        knobs = config.models.judge
        assert isinstance(knobs, Judge)
        self._service, self._fields, self._seed = knobs.name, knobs.request, config.run.seed
        self._chat = _chat_in(folder) if folder else None
        scorer = self.scorer
        self.how |= {"max_new_tokens": scorer.max_new_tokens, "temperature": scorer.temperature, **scorer.asked}
        self.how |= {"group": True} if config.score.group else {}

    def _content(self, answer: Answer) -> Hashable:
        question = self.scorer.question(answer)
        return question if self.scorer.temperature == 0 else (question, answer.row["trajectory_id"], answer.turn)

    async def ask(self, client: Client, question: Question) -> Said:
        prompt = question.content if isinstance(question.content, str) else question.content[0]
        scorer, seed = self.scorer, derive(self._seed, question.trajectory_id, question.turn, "judge")
        messages = [{"role": "user", "content": prompt}]
        if not self._chat:
            assert self._service
            fields = {"max_tokens": scorer.max_new_tokens, "temperature": scorer.temperature, "seed": seed}
            try:
                text, end = await client.chat(self._service, messages, fields | self._fields)
            except RefusedError as error:
                return Said(prompt, problem=f"{error}. If it does not know a field, {_OTHER_FIELDS}")
            return Said(prompt, text, problem=_cut(end))
        ends = self._chat.stop_token_ids
        gconfig = GenerationConfig(
            temperature=scorer.temperature, max_new_tokens=scorer.max_new_tokens, stop_token_ids=ends
        )
        try:
            prompt_ids = self._chat.prompt(quoted(messages))
            (completion,) = await client.generate(prompt_ids, gconfig, seed)
        except ContextLengthError as error:
            return Said(prompt, problem=str(error).replace("inference.", "models.judge."))
        text = self._chat.decode(completion.token_ids, prompt_ids)
        return Said(prompt, text, problem=_cut(completion.finish_reason))


def _cut(end: str) -> str:
    """Return why what a judge said counts for nothing, since it did not come to its end; empty if it did."""
    return f"it was cut ({end}): raise score.args.judge.max_new_tokens" if end in ("length", "content_filter") else ""


class RewardAsker(_OfTurns):
    """Asks a reward model about the conversation up to each turn."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, "reward")
        assert config.models.reward
        self._chat, self._most = _chat_in(folder), config.models.reward.max_model_len

    def _content(self, answer: Answer) -> Hashable:
        return tuple(self._chat.whole(messages_of(answer)))

    async def ask(self, client: Client, question: Question) -> Said:
        ids = list(question.content)
        if len(ids) > self._most:
            return Said(problem=f"{len(ids)} tokens are more than models.reward.max_model_len={self._most}")
        return Said(value=await client.pooled(ids))


class TeacherAsker:
    """Asks a teacher for the logprob of each token of each sequence."""

    def __init__(self) -> None:
        self.columns = ["trajectory_id", "token_ids", "sequence_starts"]
        self.how = dict[str, Any]()

    repeats = False

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, list[Question]]]:
        stream = iter(rows)
        while batch := list(itertools.islice(stream, _BATCH_ROWS)):
            yield {row["trajectory_id"]: [self._question(row)] for row in batch}

    def _question(self, row: dict[str, Any]) -> Question:
        cuts = [*row.get("sequence_starts", [0]), len(row["token_ids"])]
        return Question(row["trajectory_id"], -1, tuple(tuple(row["token_ids"][a:b]) for a, b in pairwise(cuts)))

    async def ask(self, client: Client, question: Question) -> Said:
        logprobs = list[float]()
        for sequence in filter(None, question.content):
            logprobs += [0.0, *(await client.prompt_logprobs(list(sequence)) if len(sequence) > 1 else [])]
        return Said(logprobs=logprobs)
