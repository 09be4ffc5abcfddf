"""A small run before it is committed: rows of drawn episodes, and methods to change them consistently."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configs import Config, load
from configs.problems import ArithmeticSource
from storage import layout
from storage.objects.store import Store
from storage.records import Call, Problem, Score, Trajectory
from storage.version_names import version_of
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary, Checkpoint
from storage.versions.drafts import Provenance
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.agents.template import Message
from tasks.inference.api import BundledGenerationOutputs, Completion
from tasks.problems import fingerprint
from tasks.problems.generated import generate
from tests.support.chain_helpers import commit_rows, commit_text
from tests.support.train_helpers import make_trajectory

GROUP = 16
EVASIVE, CUT = "I do not know.", "I think that"
_MISTAKES = [-20, -10, -3, -2, -1, 1, 2, 3, 10, 20]
_OFTEN = np.array([1, 3, 2, 4, 8, 8, 4, 2, 3, 1]) / 36

Grade = Callable[[str, Sequence[str]], str]
"""Computes the verdict from an answer and the solutions."""


def grade(answer: str, solutions: Sequence[str]) -> str:
    r"""Return the verdict of math-verify for these simple answers: the last `\boxed{}` counts and holds a number."""
    boxed = extracted(answer)
    return "unparsable" if not boxed else "correct" if boxed in solutions else "wrong"


def extracted(answer: str) -> str:
    """Return the content of the last box, or an empty text."""
    return next(reversed(re.findall(r"\\boxed\{([^}]*)\}", answer)), "")


@cache
def settings(run: str, *overrides: str) -> Config:
    """Return the demo's configuration for a run of this name."""
    return load("demo", [f"run.name={run}", "sampling.max_new_tokens=12", *overrides])


def sums(count: int, split: str = "train") -> list[Problem]:
    """Make problems like `What is 31 + 8?` with operands up to 99."""
    source = {"kind": "arithmetic", "split": split, "high": 99, "operators": ["+"], "count": count}
    return generate(ArithmeticSource.model_validate(source))


def commit_problems(store: Store, problems: Sequence[Problem]) -> str:
    """Commit a problem set if it is new; return its version."""
    version = layout.problems(fingerprint(problems))
    if not manifests.committed(store, version):
        commit(store, version, problems, [], settings("problems"))
    return version


def commit_policy(store: Store, config: Config, number: int, model: Path, canary: Canary) -> str:
    """Commit a checkpoint of the run `config.run.name`, and the run if it is new; return the checkpoint's version."""
    run, version = layout.run(config.run.name), layout.checkpoint(config.run.name, number)
    known = config.model_dump(mode="json")
    if not manifests.committed(store, run):
        commit_text(store, run, config=known)
    checkpoints.commit(store, version, model, None, canary, Provenance(config=known), [run], {})
    return version


def commit(
    store: Store, version: str, rows: Sequence[Any], parents: Sequence[str], config: Config, shard: int = 25_000
) -> None:
    known = version_of(version)
    assert known
    commit_rows(store, version, known.kind, rows, parents, config=config.model_dump(mode="json"), shard=shard)


@dataclass
class Set:
    """A data set before it is committed."""

    iteration: int
    policy: int  # policy version that plays
    rows: list[Trajectory]
    scores: list[Score]


@dataclass
class Cast:
    """The problems and policies that all scenes share."""

    store: Store
    chat: Chat
    problems: list[Problem]
    checkpoints: list[Checkpoint]
    policies: list[str]  # their versions in the store
    held_out: list[Problem]  # on which no policy is trained


@dataclass
class Scene:
    """A run of one or more data sets, which a fault may change before it is committed."""

    cast: Cast
    config: Config
    problems: list[Problem]
    problem_set: str  # version
    sets: list[Set] = field(default_factory=list)
    evaluated: list[Problem] = field(default_factory=list)  # those of the evaluation; empty: no evaluation
    replayed: set[str] = field(default_factory=set)  # ids of rows whose logprobs are not computed yet

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
        return self.sets[0].scores

    def group(self, number: int) -> list[Trajectory]:
        """Return the rows of the problem with this index in the first data set."""
        names = list(dict.fromkeys(row.problem_id for row in self.rows))
        return [row for row in self.rows if row.problem_id == names[number]]

    def change(self, row: Trajectory, **values: Any) -> Trajectory:
        """Replace columns of a row; return the new row."""
        changed = replace(row, **values)
        rows = self._set_of(row).rows
        rows[rows.index(row)] = changed
        return changed

    def change_problem(self, number: int, **values: Any) -> list[Trajectory]:
        """Change a problem in the problem set and in all rows of the first data set; return these rows."""
        self.problems[number] = replace(self.problems[number], **values)
        return [self.change(row, **values) for row in self.group(number)]

    def unscore(self, row: Trajectory) -> None:
        """Remove the scores of all turns of a row."""
        scores = self._set_of(row).scores
        scores[:] = [score for score in scores if score.trajectory_id != row.trajectory_id]

    def replay(self, row: Trajectory, *answers: str, **options: Any) -> Trajectory:
        """Replay an episode with other answers: all columns and scores are as rollout and score stage would make them.

        See `play` for the arguments.
        """
        return self.record(row, play(self.cast.chat, row, answers, **options))

    def record(self, row: Trajectory, replayed: Trajectory) -> Trajectory:
        """Replace a row by what was played instead, and its scores."""
        self.unscore(row)
        self._set_of(row).scores.extend(scores_of(replayed))
        self.replayed.add(row.trajectory_id)
        rows = self._set_of(row).rows
        rows[rows.index(row)] = replayed
        return replayed

    def _set_of(self, row: Trajectory) -> Set:
        return next(data_set for data_set in self.sets if data_set.iteration == row.iteration)

    def version(self, iteration: int) -> str:
        """Return the version of a data set."""
        return layout.trajectories(self.name, iteration)

    def commit(self) -> None:
        """Commit the problem set, the trajectories in two shards each, the scores, and the evaluation if any."""
        store, config = self.cast.store, self.config
        problem_set = commit_problems(store, self.problems)
        for data_set in self.sets:
            outdated = [row for row in data_set.rows if row.problem_set == self.problem_set != problem_set]
            for row in outdated:
                self.change(row, problem_set=problem_set)
            version = self.version(data_set.iteration)
            parents = [self.cast.policies[data_set.policy], problem_set]
            commit(store, version, data_set.rows, parents, config, len(data_set.rows) // 2 + 1)
            scores = layout.scores(self.name, data_set.iteration, "5c0e")
            commit(store, scores, data_set.scores, [version], config)
        if self.evaluated:  # only what it was on is of interest
            version = layout.evaluation(layout.checkpoint(self.name, 0), "held-out", "greedy-0123456789ab")
            commit(store, version, [], [commit_problems(store, self.evaluated)], config)
        self.problem_set = problem_set


def compute_logprobs(scenes: Sequence[Scene]) -> None:
    """Compute the logprobs of all replayed rows with the weights of the policies that play them."""
    for number, checkpoint in enumerate(scenes[0].cast.checkpoints):
        sets = [(scene, data_set) for scene in scenes for data_set in scene.sets if data_set.policy == number]
        rows = [row for scene, data_set in sets for row in data_set.rows if row.trajectory_id in scene.replayed]
        known = dict(zip((row.trajectory_id for row in rows), logprobs(checkpoint.model, rows), strict=True))
        for _, data_set in sets:
            data_set.rows[:] = [replace(r, logprobs=known.get(r.trajectory_id, r.logprobs)) for r in data_set.rows]
    for scene in scenes:
        scene.replayed.clear()


def logprobs(model: Path, rows: Sequence[Trajectory]) -> list[list[float]]:
    """Compute the column of logprobs of each row."""
    from tasks.train.policy import StoredTokens, recompute

    stored = [StoredTokens(row.trajectory_id, row.token_ids, row.action_mask, row.sequence_starts) for row in rows]
    columns = []
    for row, values in zip(rows, recompute(model, stored, 1.0), strict=True):
        column = np.zeros(len(row.token_ids))
        if values is not None:
            column[np.array(row.action_mask)] = values
        columns.append(column.tolist())
    return columns


def say(row: Trajectory, turn: int, **columns: Any) -> Trajectory:
    """Return `row` with other columns in one turn."""
    turns = list(row.turns)
    turns[turn] = replace(turns[turn], **columns)
    return replace(row, turns=turns)


def spec_of(row: Trajectory) -> EpisodeSpec:
    """Return the identity of a row's episode."""
    return EpisodeSpec(row.trajectory_id, Problem(row.problem_id, row.prompt, row.solutions), row.seed, row)


def play(
    chat: Chat,
    row: Trajectory,
    answers: Sequence[str],
    *,
    prompt: str = "",
    system: str = "",
    feedback: str = WRONG_FEEDBACK,
    cut: bool = False,
    grade: Grade = grade,
    calls: Sequence[Call] = (),
) -> Trajectory:
    """Play an episode: all columns are as a rollout would make them, without logprobs.

    Args:
        chat: the tokenizer with its template.
        row: the identity of the episode.
        answers: one answer for each turn.
        prompt: the prompt, if it is not the row's.
        system: system message before the prompt.
        feedback: feedback between turns.
        cut: whether the last turn ended at the token limit.
        grade: computes the verdict of each answer.
        calls: calls of tools; their turns answer nothing if they got an output, which then is the feedback.
    """
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
    return replace(episode.trajectory(row.turn_discount), calls=list(calls), ungraded=ungraded)


def scores_of(row: Trajectory) -> list[Score]:
    """Return the scores of a row as the score stage would make them."""
    name, solution, scores = row.trajectory_id, row.solutions[0], list[Score]()
    for number, turn in enumerate(row.turns):
        verdict: Any = "none" if number in row.ungraded else turn.verdict
        answer = extracted(turn.text) if turn.verdict in ("correct", "wrong") else ""
        scores.append(Score(name, number, verdict, turn.reward, answer, solution, "", turn.reward))
    return scores


def draw(problem: Problem, rate: float, rng: np.random.Generator) -> list[str]:
    """Draw the answers of an episode: mistakes near the right number, and a few evasive or cut answers."""
    right = rf"\boxed{{{problem.solutions[0]}}}"

    def answer(rate: float) -> str:
        if rng.random() < rate:
            return right
        odd, mistake = rng.random(), int(rng.choice(_MISTAKES, p=_OFTEN))
        return EVASIVE if odd < 0.02 else CUT if odd > 0.98 else rf"\boxed{{{int(problem.solutions[0]) + mistake}}}"

    first = answer(rate)
    if first in (right, CUT):
        return [first]
    return [first, first if rng.random() < 0.3 else answer(0.4)]


def episodes(chat: Chat, name: str, problems: Sequence[Problem], known: dict[str, Any]) -> list[Trajectory]:
    """Play a group of each problem, of which one episode solves it; `known` has columns that all rows share."""
    rng, rows = np.random.default_rng(0), []
    for number, problem in enumerate(problems):
        rate = 0.3 + 0.5 * rng.random()
        of_problem = known | {"prompt": problem.prompt, "solutions": problem.solutions}
        for sample in range(GROUP):
            row = make_trajectory(f"{name}/{problem.problem_id}/{sample}", [], problem=problem.problem_id)
            row = replace(row, sample=sample, seed=10 * sample, unplayed_turns=0, **of_problem)
            answers = draw(problem, 1.0 if sample == number % GROUP else rate, rng)
            rows.append(play(chat, row, answers, cut=answers[-1] == CUT))
    return rows


def set_scene(cast: Cast, config: Config, problems: Sequence[int], policies: Sequence[int]) -> Scene:
    """Make a run that plays these problems in each iteration; `policies` holds each iteration's policy version."""
    chosen = [cast.problems[index] for index in problems]
    problem_set = commit_problems(cast.store, chosen)
    scene = Scene(cast, config, chosen, problem_set)
    for iteration, policy in enumerate(policies):
        known = {"run": scene.name, "iteration": iteration, "problem_set": problem_set}
        known |= {"policy": cast.policies[policy], "policy_version": policy, "sampling": '{"temperature": 1.0}'}
        rows = episodes(cast.chat, f"{scene.name}/{iteration:06d}", chosen, known)
        scene.sets.append(Set(iteration, policy, rows, [score for row in rows for score in scores_of(row)]))
        scene.replayed.update(row.trajectory_id for row in rows)
    return scene


def write_run(store: Store, name: str, rows: int, rows_per_set: int = 10_000) -> None:
    """Commit a scored run of `rows` trajectories, by a policy with a tokenizer but no weights.

    All data sets have the same episodes, with their own ids and policy versions.
    """
    from safetensors.numpy import save_file
    from transformers import Qwen3Config

    from tests.support.tiny_tokenizer import build_tokenizer

    config, problems = settings(name), sums(rows_per_set // GROUP)
    tokenizer = build_tokenizer([*(problem.prompt for problem in problems), r"\boxed", WRONG_FEEDBACK])
    problem_set = commit_problems(store, problems)
    played = episodes(Chat(tokenizer), name, problems, {"run": name, "problem_set": problem_set})
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(folder)
        save_file({"nothing": np.zeros(1, np.float32)}, f"{folder}/model.safetensors")
        for iteration in range(-(-rows // rows_per_set)):
            policy = commit_policy(store, config, iteration, Path(folder), Canary([1, 2], [-1.0]))
            known: dict[str, Any] = {"iteration": iteration, "policy": policy, "policy_version": iteration}
            ours = played[: rows - iteration * rows_per_set]
            made = [replace(row, trajectory_id=f"{iteration:06d}/{row.trajectory_id}", **known) for row in ours]
            made = [replace(row, versions=[iteration if acts else -1 for acts in row.action_mask]) for row in made]
            trajectories = layout.trajectories(name, iteration)
            commit(store, trajectories, made, [policy, problem_set], config)
            scores = [score for row in made for score in scores_of(row)]
            commit(store, layout.scores(name, iteration, "5c0e"), scores, [trajectories], config)
