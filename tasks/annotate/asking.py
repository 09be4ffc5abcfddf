"""What is asked of a model beside the policy, and how its answer becomes an annotation."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from configs import Config
from configs.models import Judge, Role
from storage.records import Annotation
from storage.visible import described
from tasks.agents.chat import Chat, engine_ends, load_tokenizer
from tasks.inference.api import ContextLengthError, GenerationConfig
from tasks.inference.client import Client
from tasks.score.by_model import JudgeScorer, messages_of
from tasks.score.interface import Answer
from tasks.score.scorers import OWN_COLUMNS, SCORERS
from tasks.score.scoring import batches
from tasks.seeds import derive

_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a turn, or (turn -1) about a trajectory.

    Example: Question("demo/3/12+7/0", 0, "You grade an answer to a problem. …")
    """

    trajectory_id: str
    turn: int
    content: Hashable  # questions with the same content get the same answer


@dataclass(frozen=True, slots=True)
class Said:
    """What a model said to a question; see `Annotation` for the fields."""

    prompt: str = ""
    answer: str = ""
    value: float = 0.0
    logprobs: Sequence[float] = ()
    problem: str = ""

    def about(self, question: Question, model: str) -> Annotation:
        """Return it as the annotation of a question by the model with this identity."""
        place = question.trajectory_id, question.turn
        return Annotation(*place, model, self.prompt, self.answer, self.value, list(self.logprobs), self.problem)


class Asker(Protocol):
    """Asks one model."""

    columns: list[str]
    """The columns of trajectories that it reads."""
    how: dict[str, Any]
    """All that its answers depend on, besides the model and the trajectories."""

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[list[str], list[Question]]]:
        """Yield ids of some trajectories at a time, and the questions about them."""

    async def ask(self, client: Client, question: Question) -> Said:
        """Ask a server."""


class _OfTurns:
    """Asks about the turns whose scorer asks this model."""

    def __init__(self, config: Config, role: Role) -> None:
        score, name = config.score, config.score.models[role]
        self._by_source, self._name, self._by_group = score.by_source, name, score.group
        self._scorer: Any = SCORERS.make(name, None, score.args.get(name, {}))
        sources = sorted(source for source, scorer in score.by_source.items() if scorer == name)
        others = sorted(set(score.by_source) - set(sources)) if "default" in sources else []
        self.columns = ["trajectory_id", "turns", "source", "ungraded", "answers", *OWN_COLUMNS]
        self.how: dict[str, Any] = {"sources": sources, "others": others}

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[list[str], list[Question]]]:
        for answers in batches(rows, by_group=self._by_group, size=_BATCH_ROWS):
            ids = dict.fromkeys(answer.row["trajectory_id"] for answer in answers)
            yield list(ids), [self._question(answer) for answer in answers if self._is_asked(answer)]

    def _is_asked(self, answer: Answer) -> bool:
        scorer = self._by_source.get(answer.row["source"], self._by_source["default"])
        return scorer == self._name and not answer.ungraded

    def _question(self, answer: Answer) -> Question:
        return Question(answer.row["trajectory_id"], answer.turn, self._content(answer))

    def _content(self, answer: Answer) -> Hashable:
        raise NotImplementedError


class JudgeAsker(_OfTurns):
    """Asks a judge with its rubric. What it says has a seed of its own for each question.

    Args:
        config: the configuration.
        folder: of the model; None: a service, which is asked by the judge's name.
    """

    _scorer: JudgeScorer

    def __init__(self, config: Config, folder: Path | None) -> None:
        super().__init__(config, "judge")
        knobs = config.models.judge
        assert isinstance(knobs, Judge)
        self._service, self._seed, self._most = knobs.name, config.run.seed, knobs.max_model_len
        self._chat = Chat(load_tokenizer(folder), ends=engine_ends(folder)) if folder else None
        scorer = self._scorer
        asked = {"max_new_tokens": scorer.max_new_tokens, "temperature": scorer.temperature, "context": self._most}
        self.how |= asked | scorer.asked | ({"group": True} if self._by_group else {})

    def _content(self, answer: Answer) -> Hashable:
        place = f"{answer.row['trajectory_id']}, turn {answer.turn}"
        try:
            question = self._scorer.question(answer)
        except TemplateError as error:
            raise ValueError(f"score.args.judge.prompt cannot be filled in for {place}: {described(error)}") from error
        return question if self._scorer.temperature == 0 else (question, place)

    async def ask(self, client: Client, question: Question) -> Said:
        prompt = question.content if isinstance(question.content, str) else question.content[0]  # type: ignore[index]
        scorer, seed = self._scorer, derive(self._seed, question.trajectory_id, question.turn, "judge")
        messages = [{"role": "user", "content": prompt}]
        if not self._chat:
            assert self._service
            limits = scorer.max_new_tokens, scorer.temperature
            return Said(prompt, await client.chat(self._service, messages, *limits, seed))
        ends = self._chat.stop_token_ids
        gconfig = GenerationConfig(
            temperature=scorer.temperature, max_new_tokens=scorer.max_new_tokens, stop_token_ids=ends
        )
        try:
            (completion,) = await client.generate(self._chat.prompt(messages), gconfig, seed)
        except ContextLengthError as error:
            return Said(prompt, problem=str(error).replace("inference.", "models.judge."))
        return Said(prompt, self._chat.completion_text(completion.token_ids))


class RewardAsker(_OfTurns):
    """Asks a reward model about the conversation up to each turn."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, "reward")
        assert config.models.reward
        self._chat, self._most = (
            Chat(load_tokenizer(folder), ends=engine_ends(folder)),
            config.models.reward.max_model_len,
        )
        self.how |= {"dtype": config.models.reward.dtype, "context": self._most}

    def _content(self, answer: Answer) -> Hashable:
        return tuple(self._chat.whole(messages_of(answer)))

    async def ask(self, client: Client, question: Question) -> Said:
        ids = list(question.content)  # type: ignore[call-overload] # its own content
        if len(ids) > self._most:
            return Said(problem=f"{len(ids)} tokens are more than models.reward.max_model_len={self._most}")
        return Said(value=await client.pooled(ids))


class TeacherAsker:
    """Asks a teacher for the logprob of each token of each sequence."""

    def __init__(self, config: Config) -> None:
        assert config.models.teacher
        self.columns = ["trajectory_id", "token_ids", "sequence_starts"]
        self.how: dict[str, Any] = {"dtype": config.models.teacher.dtype}

    def questions(self, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[list[str], list[Question]]]:
        stream = iter(rows)
        while batch := list(itertools.islice(stream, _BATCH_ROWS)):
            yield [row["trajectory_id"] for row in batch], [self._question(row) for row in batch]

    def _question(self, row: dict[str, Any]) -> Question:
        cuts = [*row.get("sequence_starts", [0]), len(row["token_ids"])]
        return Question(row["trajectory_id"], -1, tuple(tuple(row["token_ids"][a:b]) for a, b in pairwise(cuts)))

    async def ask(self, client: Client, question: Question) -> Said:
        logprobs = list[float]()
        for sequence in question.content:  # type: ignore[attr-defined] # its own content
            logprobs += [0.0, *(await client.prompt_logprobs(list(sequence)) if len(sequence) > 1 else [])]
        return Said(logprobs=logprobs)
