"""A small run before it is committed: rows of generated episodes, and methods to change them consistently."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from configs import Config
from storage import layout
from storage.objects.store import Store
from storage.records import (
    SCORE_SCHEMA,
    TRAJECTORY_SCHEMA,
    Call,
    Problem,
    Score,
    Trajectory,
    to_score,
    to_table,
    to_trajectory,
)
from storage.versions import manifests
from storage.versions.checkpoints import Checkpoint
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.agents.template import Message
from tasks.inference.api import BundledGenerationOutputs, Completion
from tasks.score.scoring import scorer_fingerprint
from tests.support import audit_helpers as helpers
from tests.support.audit_helpers import Identity, Language, Weights

Grade = Callable[[str, Sequence[str]], str]
"""Computes the verdict from an answer and the solutions."""


def grade(answer: str, solutions: Sequence[str]) -> str:
    r"""Return the verdict of math-verify for these simple answers: the last `\boxed{}` counts and holds a number."""
    boxed = extracted(answer)
    return "unparsable" if not boxed else "correct" if boxed in solutions else "wrong"


def extracted(answer: str) -> str:
    """Return the content of the last box, or an empty text."""
    return next(reversed(re.findall(r"\\boxed\{([^}]*)\}", answer)), "")


@dataclass
class Set:
    """A data set before it is committed."""

    iteration: int
    policy: int  # policy version that plays
    rows: list[Trajectory]
    scores: list[Score] | None  # None: the score stage did not run

    def group(self, number: int) -> list[Trajectory]:
        """Return the rows of the problem with this index in the set."""
        names = list(dict.fromkeys(row.problem_id for row in self.rows))
        return [row for row in self.rows if row.problem_id == names[number]]


@dataclass
class Cast:
    """The problems, policies and weights that all scenes share."""

    store: Store
    language: Language
    checkpoints: list[Checkpoint]
    policies: list[str]  # their versions in the store
    weights: list[Weights]
    held_out: list[int]  # indices of problems that no policy is trained on


@dataclass
class Scene:
    """A run of one or more data sets, which a fault may change before it is committed."""

    cast: Cast
    config: Config
    problems: list[Problem]
    problem_set: str  # version
    sets: list[Set] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)  # indices of the evaluation's problems; empty: no evaluation
    _replayed: set[str] = field(default_factory=set)  # ids of rows whose logprobs are not computed yet

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def rows(self) -> list[Trajectory]:
        """The rows of the first data set."""
        return self.sets[0].rows

    @property
    def scores(self) -> list[Score]:
        """The scores of the first data set."""
        assert self.sets[0].scores is not None
        return self.sets[0].scores

    def group(self, number: int) -> list[Trajectory]:
        """Return a group of the first data set."""
        return self.sets[0].group(number)

    def turns(self) -> Iterator[tuple[Trajectory, int]]:
        """Iterate over (row, turn number) of the first data set."""
        return ((row, turn) for row in self.rows for turn in range(len(row.turns)))

    def change(self, row: Trajectory, **values: Any) -> Trajectory:
        """Replace columns of a row; return the new row."""
        changed = replace(row, **values)
        rows = self._set_of(row).rows
        rows[rows.index(row)] = changed
        return changed

    def change_turn(self, row: Trajectory, number: int, **values: Any) -> Trajectory:
        turns = list(row.turns)
        turns[number] = replace(turns[number], **values)
        return self.change(row, turns=turns)

    def change_problem(self, number: int, **values: Any) -> list[Trajectory]:
        """Change a problem in the problem set and in all rows of the first data set; return these rows."""
        self.problems[number] = replace(self.problems[number], **values)
        return [self.change(row, **values) for row in self.group(number)]

    def rescore(self, row: Trajectory, number: int, **values: Any) -> None:
        """Replace columns of a turn's score."""
        scores = self._scores_of(row)
        place = next(i for i, s in enumerate(scores) if (s.trajectory_id, s.turn) == (row.trajectory_id, number))
        scores[place] = replace(scores[place], **values)

    def unscore(self, row: Trajectory) -> None:
        """Remove the scores of all turns of a row."""
        scores = self._scores_of(row)
        scores[:] = [score for score in scores if score.trajectory_id != row.trajectory_id]

    def replay(
        self,
        row: Trajectory,
        *answers: str,
        prompt: str | None = None,
        system: str = "",
        feedback: str = WRONG_FEEDBACK,
        cut: bool = False,
        grade: Grade = grade,
        calls: Sequence[Call] = (),
    ) -> Trajectory:
        """Replay an episode with other answers: all columns and scores are as rollout and score stage would make them.

        Args:
            row: the row that is replaced.
            answers: one answer for each turn.
            prompt: the prompt, if it is not the row's.
            system: system message before the prompt.
            feedback: feedback between turns.
            cut: whether the last turn ended at the token limit.
            grade: computes the verdict of each answer.
            calls: calls of tools; their turns answer nothing if they got an output, which then is the feedback.
        """
        chat = self.cast.language.chat
        messages: list[Message] = [{"role": "user", "content": prompt or row.prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        ungraded = sorted({call.turn for call in calls if call.status != "unparsable"})
        episode = Episode(spec_of(row), chat.prompt(messages))
        for number, text in enumerate(answers):
            last = number == len(answers) - 1
            ids = chat.encode(text + ("" if cut and last else "<|im_end|>"))
            nothing, versions = [0.0] * len(ids), [row.policy_version] * len(ids)
            completion = Completion(ids, nothing, versions, "length" if cut and last else "stop")
            seed = row.turns[number].seed if number < len(row.turns) else 2**31 + row.seed + number
            outputs = BundledGenerationOutputs(row.trajectory_id, episode.prompt_ids, [completion], [seed], 0.1)
            episode.add_completion(outputs, chat.decode(ids))
            verdict = "" if number in ungraded else grade(episode.turns[-1].text, row.solutions)
            episode.turns[-1] = replace(episode.turns[-1], verdict=verdict, reward=float(verdict == "correct"))
            if not last:
                told = "\n".join(call.output for call in calls if call.turn == number and call.output) or feedback
                following = chat.next_prompt(messages, ids, told)
                episode.add_feedback(told, following.token_ids)
                messages = following.messages
        replayed = episode.trajectory(row.turn_discount)
        return self.record(row, replace(replayed, calls=list(calls), ungraded=ungraded))

    def record(self, row: Trajectory, replayed: Trajectory) -> Trajectory:
        """Replace a row by what was played instead, and its scores."""
        self.unscore(row)
        self._scores_of(row).extend(
            Score(
                trajectory_id=replayed.trajectory_id,
                turn=number,
                verdict="none" if number in replayed.ungraded else turn.verdict,  # type: ignore[arg-type]  # may be anything
                success=turn.reward,
                extracted=extracted(turn.text) if turn.verdict in ("correct", "wrong") else "",
                solution=replayed.solutions[0],
                reason="",
                reward=turn.reward,
            )
            for number, turn in enumerate(replayed.turns)
        )
        self._replayed.add(row.trajectory_id)
        return self.change(row, **{name: getattr(replayed, name) for name in _REPLAYED})

    def _set_of(self, row: Trajectory) -> Set:
        return next(data_set for data_set in self.sets if data_set.iteration == row.iteration)

    def _scores_of(self, row: Trajectory) -> list[Score]:
        scores = self._set_of(row).scores
        assert scores is not None
        return scores

    def compute_logprobs(self) -> None:
        """Compute the logprobs of all replayed rows."""
        for data_set in self.sets:
            rows = [row for row in data_set.rows if row.trajectory_id in self._replayed]
            for row, logprobs in zip(rows, self.logprobs(rows, data_set.policy), strict=True):
                self.change(row, logprobs=logprobs)
        self._replayed.clear()

    def logprobs(self, rows: Sequence[Trajectory], policy: int, temperature: float = 1.0) -> list[list[float]]:
        """Compute the logprobs of the rows with a policy's weights."""

        def sequences(name: str, dtype: Any) -> list[Any]:
            columns = [(np.array(getattr(row, name), dtype), row.sequence_starts[1:]) for row in rows]
            return [part for column, starts in columns for part in np.split(column, starts)]

        ids, masks = sequences("token_ids", np.int32), sequences("action_mask", np.bool_)
        parts = iter(self.cast.weights[policy].of(ids, masks, temperature))
        return [np.concatenate([next(parts) for _ in row.sequence_starts]).tolist() for row in rows]

    def commit(self) -> "Committed":
        """Commit the problem set, the trajectories in two shards each, the scores, and the evaluation if any."""
        store, config = self.cast.store, self.config
        problem_set = helpers.commit_problems(store, self.problems)
        trajectories, scores = [], []
        for data_set in self.sets:
            outdated = [row for row in data_set.rows if row.problem_set == self.problem_set != problem_set]
            for row in outdated:
                self.change(row, problem_set=problem_set)
            version = layout.trajectories(self.name, data_set.iteration)
            parents = [self.cast.policies[data_set.policy], problem_set]
            shard = len(data_set.rows) // 2 + 1
            rows = to_table(data_set.rows, TRAJECTORY_SCHEMA)
            helpers.commit(store, version, "trajectories", rows, parents, config, shard)
            trajectories.append(version)
            if data_set.scores is not None:
                scored = layout.scores(self.name, data_set.iteration, "5c0e")
                table = to_table(data_set.scores, SCORE_SCHEMA)
                helpers.commit(store, scored, "scores", table, trajectories[-1:], config)
                scores.append(scored)
        if self.evaluated:
            self._evaluate()
        return Committed(problem_set, trajectories, scores)

    def _evaluate(self) -> None:
        """Commit an evaluation with one greedy episode of each problem, by a checkpoint of this run."""
        cast, rng = self.cast, np.random.default_rng(0)
        store, checkpoint = cast.store, cast.checkpoints[0]
        policy = layout.checkpoint(self.name, 0)
        if not manifests.committed(store, policy):
            helpers.commit_policy(store, self.config, 0, checkpoint.model, checkpoint.canary)
        problem_set = helpers.commit_problems(store, [cast.language.problems[index] for index in self.evaluated])
        name = f"{self.name}/evaluation/000000/held-out/greedy"
        identity = Identity(name, self.name, 0, policy, 0, problem_set, temperature=0.0)
        episodes = helpers.play(cast.language, np.array(self.evaluated), rng, size=1)
        rows = helpers.tables(cast.language, identity, episodes, rng, cast.weights[0].behaviour)
        version = layout.evaluation(policy, "held-out", "greedy-0123456789ab")
        scores = layout.evaluation_scores(version, scorer_fingerprint(self.config.score))
        helpers.commit(store, version, "evaluation", rows[0], [policy, problem_set], self.config)
        helpers.commit(store, scores, "scores", rows[1], [version], self.config)


_REPLAYED = (
    "status", "reason", "token_ids", "action_mask", "logprobs", "versions", "turns", "sequence_starts", "calls",
    "ungraded", "follows",
)  # fmt: skip


def spec_of(row: Trajectory) -> EpisodeSpec:
    """Return the identity of a row's episode."""
    return EpisodeSpec(row.trajectory_id, Problem(row.problem_id, row.prompt, row.solutions), row.seed, row)


@dataclass(frozen=True, slots=True)
class Committed:
    """The versions of a scene."""

    problem_set: str
    trajectories: Sequence[str]
    scores: Sequence[str]


def set_scene(cast: Cast, config: Config, problems: Sequence[int], policies: Sequence[int]) -> Scene:
    """Make a run that plays these problems in each iteration; `policies` holds each iteration's policy version."""
    language, name = cast.language, config.run.name
    chosen = [language.problems[index] for index in problems]
    problem_set = helpers.commit_problems(cast.store, chosen)
    scene = Scene(cast, config, chosen, problem_set)
    for iteration, policy in enumerate(policies):
        rng = np.random.default_rng(int(problems[0]) + iteration)
        identity = Identity(f"{name}/{iteration:06d}", name, iteration, cast.policies[policy], policy, problem_set)
        episodes = helpers.play(language, np.array(problems), rng)
        rows, scores = helpers.tables(language, identity, episodes, rng, cast.weights[policy].behaviour)
        records = [to_trajectory(row) for row in rows.to_pylist()]
        scene.sets.append(Set(iteration, policy, records, [to_score(score) for score in scores.to_pylist()]))
    return scene
