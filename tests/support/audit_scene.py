"""A small run in the making: real rows of generated episodes, and what a fault needs to change them consistently."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from configs import Config
from storage import layout
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA, Problem, Score, Trajectory, to_table, to_trajectory
from storage.versions import manifests
from storage.versions.checkpoints import Checkpoint
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.agents.template import Message
from tasks.inference.api import BundledGenerationOutputs, Completion
from tests.support import audit_helpers as made
from tests.support.audit_helpers import Identity, Language, Weights

Judge = Callable[[str, Sequence[str]], str]
"""From an answer and the solutions to a verdict."""


def judge(answer: str, solutions: Sequence[str]) -> str:
    r"""What math-verify says of the answers here: the last `\boxed{}` counts, and is a number."""
    found = extracted(answer)
    return "unparsable" if not found else "correct" if found in solutions else "wrong"


def extracted(answer: str) -> str:
    """What is in the last box."""
    return next(reversed(re.findall(r"\\boxed\{([^}]*)\}", answer)), "")


@dataclass
class Set:
    """A data set before it is committed."""

    iteration: int
    policy: int  # version that plays
    rows: list[Trajectory]
    scores: list[Score] | None  # None: the score stage never came

    def group(self, number: int) -> list[Trajectory]:
        """The rows of the problem with this number, as it stands in the set."""
        names = list(dict.fromkeys(row.problem_id for row in self.rows))
        return [row for row in self.rows if row.problem_id == names[number]]


@dataclass
class Cast:
    """What all scenes share: problems, policies and their weights."""

    store: Store
    language: Language
    checkpoints: list[Checkpoint]
    policies: list[str]  # their versions in the store
    weights: list[Weights]
    held_out: list[int]  # indices of problems that nobody is trained on


@dataclass
class Scene:
    """A run of one or more data sets, which a fault may change; then it is committed."""

    cast: Cast
    config: Config
    problems: list[Problem]
    problem_set: str  # version
    sets: list[Set] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)  # problems of its evaluation set; none: it has no evaluation
    _retold: set[str] = field(default_factory=set)  # ids of rows whose logprobs are still to be computed

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def rows(self) -> list[Trajectory]:
        """Of the first data set."""
        return self.sets[0].rows

    @property
    def scores(self) -> list[Score]:
        """Of the first data set."""
        assert self.sets[0].scores is not None
        return self.sets[0].scores

    def group(self, number: int) -> list[Trajectory]:
        """Of the first data set."""
        return self.sets[0].group(number)

    def turns(self) -> Iterator[tuple[Trajectory, int]]:
        """Of the first data set, with their numbers."""
        return ((row, turn) for row in self.rows for turn in range(len(row.turns)))

    def change(self, row: Trajectory, **values: Any) -> Trajectory:
        """Other columns."""
        changed = replace(row, **values)
        rows = self._set_of(row).rows
        rows[rows.index(row)] = changed
        return changed

    def change_turn(self, row: Trajectory, number: int, **values: Any) -> Trajectory:
        turns = list(row.turns)
        turns[number] = replace(turns[number], **values)
        return self.change(row, turns=turns)

    def change_problem(self, number: int, **values: Any) -> list[Trajectory]:
        """Another prompt or other solutions, in the problem set and in all rows of the first data set."""
        self.problems[number] = replace(self.problems[number], **values)
        return [self.change(row, **values) for row in self.group(number)]

    def rescore(self, row: Trajectory, number: int, **values: Any) -> None:
        """Another score of a turn."""
        scores = self._scores_of(row)
        place = next(i for i, s in enumerate(scores) if (s.trajectory_id, s.turn) == (row.trajectory_id, number))
        scores[place] = replace(scores[place], **values)

    def unscore(self, row: Trajectory) -> None:
        """No score of any turn."""
        scores = self._scores_of(row)
        scores[:] = [score for score in scores if score.trajectory_id != row.trajectory_id]

    def retell(
        self,
        row: Trajectory,
        *answers: str,
        prompt: str | None = None,
        system: str = "",
        told: str = WRONG_FEEDBACK,
        cut: bool = False,
        judge: Judge = judge,
    ) -> Trajectory:
        """The episode with other answers: all columns and scores as a rollout and the score stage would have them.

        Args:
            row: what becomes another.
            answers: one for each turn.
            prompt: what the policy is asked, where it is not the row's own.
            system: message before it.
            told: feedback between turns.
            cut: the last turn ended at the token limit.
            judge: says what answers are worth.
        """
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, {"role": "user", "content": prompt or row.prompt}]
        episode = self._play(row, messages, answers, told, cut)
        for number, text in enumerate(turn.text for turn in episode.turns):
            verdict = judge(text, row.solutions)
            turn = episode.turns[number]
            episode.turns[number] = replace(turn, verdict=verdict, reward=float(verdict == "correct"))
        told_anew = episode.trajectory(row.turn_discount)
        self.unscore(row)
        self._scores_of(row).extend(self._judged(told_anew))
        self._retold.add(row.trajectory_id)
        return self.change(row, **{name: getattr(told_anew, name) for name in _TOLD})

    def _play(self, row: Trajectory, messages: list[Message], answers: Sequence[str], told: str, cut: bool) -> Episode:
        chat = self.cast.language.chat
        problem = Problem(row.problem_id, row.prompt, row.solutions)
        episode = Episode(EpisodeSpec(row.trajectory_id, problem, row.seed, row), chat.prompt(messages))
        for number, text in enumerate(answers):
            last = number == len(answers) - 1
            ids = chat.encode(text + ("" if cut and last else "<|im_end|>"))
            nothing, versions = [0.0] * len(ids), [row.policy_version] * len(ids)
            completion = Completion(ids, nothing, versions, "length" if cut and last else "stop")
            seed = row.turns[number].seed if number < len(row.turns) else 2**31 + row.seed + number
            outputs = BundledGenerationOutputs(row.trajectory_id, episode.prompt_ids, [completion], [seed], 0.1)
            episode.add_completion(outputs, chat.decode(ids))
            if not last:
                following = chat.next_prompt(messages, ids, told)
                episode.add_feedback(told, following.token_ids)
                messages = following.messages
        return episode

    def _judged(self, row: Trajectory) -> list[Score]:
        return [
            Score(
                trajectory_id=row.trajectory_id,
                turn=number,
                verdict=turn.verdict,  # type: ignore[arg-type]  # a turn's verdict may be anything
                success=turn.reward,
                extracted=extracted(turn.text) if turn.verdict in ("correct", "wrong") else "",
                solution=row.solutions[0],
                reason="",
            )
            for number, turn in enumerate(row.turns)
        ]

    def _set_of(self, row: Trajectory) -> Set:
        return next(each for each in self.sets if each.iteration == row.iteration)

    def _scores_of(self, row: Trajectory) -> list[Score]:
        scores = self._set_of(row).scores
        assert scores is not None
        return scores

    def settle(self) -> None:
        """Compute the logprobs of what was retold, all at once."""
        for each in self.sets:
            rows = [row for row in each.rows if row.trajectory_id in self._retold]
            for row, logprobs in zip(rows, self.logprobs(rows, each.policy), strict=True):
                self.change(row, logprobs=logprobs)
        self._retold.clear()

    def logprobs(self, rows: Sequence[Trajectory], policy: int, temperature: float = 1.0) -> list[list[float]]:
        """What a policy's weights give."""
        ids = [np.array(row.token_ids, np.int32) for row in rows]
        masks = [np.array(row.action_mask, np.bool_) for row in rows]
        return [found.tolist() for found in self.cast.weights[policy].of(ids, masks, temperature)]

    def commit(self) -> "Committed":
        """Problem set, trajectories and scores, each in two shards."""
        store, config = self.cast.store, self.config
        problem_set = made.commit_problems(store, self.problems)
        trajectories, scores = [], []
        for each in self.sets:
            mine = [row for row in each.rows if row.problem_set == self.problem_set != problem_set]
            for row in mine:
                self.change(row, problem_set=problem_set)
            version = layout.trajectories(self.name, each.iteration)
            parents = [self.cast.policies[each.policy], problem_set]
            shard = len(each.rows) // 2 + 1
            rows = to_table(each.rows, TRAJECTORY_SCHEMA)
            made.commit(store, version, "trajectories", rows, parents, config, shard)
            trajectories.append(version)
            if each.scores is not None:
                judged = layout.scores(self.name, each.iteration, "5c0e")
                made.commit(store, judged, "scores", to_table(each.scores, SCORE_SCHEMA), trajectories[-1:], config)
                scores.append(judged)
        if self.evaluated:
            self._evaluate()
        return Committed(problem_set, trajectories, scores)

    def _evaluate(self) -> None:
        """One greedy episode of each problem, by a checkpoint of the run's own."""
        cast, rng = self.cast, np.random.default_rng(0)
        store, checkpoint = cast.store, cast.checkpoints[0]
        policy = layout.checkpoint(self.name, 0)
        if not manifests.committed(store, policy):
            made.commit_policy(store, self.config, 0, checkpoint.model, checkpoint.canary)
        problem_set = made.commit_problems(store, [cast.language.problems[index] for index in self.evaluated])
        name = f"{self.name}/evaluation/000000/held-out/greedy"
        identity = Identity(name, self.name, 0, policy, 0, problem_set, temperature=0.0)
        episodes = made.play(cast.language, np.array(self.evaluated), rng, size=1)
        rows = made.tables(cast.language, identity, episodes, rng, cast.weights[0].behaviour)
        made.commit_evaluation(store, self.config, policy, problem_set, rows)


_TOLD = ("status", "reason", "token_ids", "action_mask", "logprobs", "versions", "turns", "sequence_starts")


@dataclass(frozen=True, slots=True)
class Committed:
    """The versions of a scene."""

    problem_set: str
    trajectories: Sequence[str]
    scores: Sequence[str]


def set_scene(cast: Cast, config: Config, problems: Sequence[int], policies: Sequence[int]) -> Scene:
    """A run that plays these problems in each of its iterations, with these policy versions."""
    language, name = cast.language, config.run.name
    chosen = [language.problems[index] for index in problems]
    problem_set = made.commit_problems(cast.store, chosen)
    scene = Scene(cast, config, chosen, problem_set)
    for iteration, policy in enumerate(policies):
        rng = np.random.default_rng(int(problems[0]) + iteration)
        identity = Identity(f"{name}/{iteration:06d}", name, iteration, cast.policies[policy], policy, problem_set)
        episodes = made.play(language, np.array(problems), rng)
        rows, scores = made.tables(language, identity, episodes, rng, cast.weights[policy].behaviour)
        records = [to_trajectory(row) for row in rows.to_pylist()]
        scene.sets.append(Set(iteration, policy, records, [Score(**score) for score in scores.to_pylist()]))
    return scene
