"""Generated trajectory data sets in the form of the demo's rollouts, without a model and without a loop over rows.

A row is a sequence of pieces: the prompt of a problem, an answer, feedback, another answer. Each piece is encoded once,
and one gather makes the token columns of all rows. A million rows take ten seconds. With `Weights` a real tiny model
computes the logprobs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from configs import Config, load
from configs.problems import ArithmeticSource
from storage import layout
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, SCORE_SCHEMA, TRAJECTORY_SCHEMA, Problem, to_table
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary
from storage.versions.datasets import write_parquet
from storage.versions.drafts import Draft, Provenance
from tasks.agents.chat import Chat
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.problems import fingerprint
from tasks.problems.arithmetic import generate
from tasks.score.scoring import scorer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

GROUP = 16
LIMIT = 12  # tokens of an answer
EVASIVE, CUT = "I do not know.", "I think that"  # the second has exactly LIMIT tokens
STARTED_AT = 1_795_000_000.0
_MISTAKES = np.array([-20, -10, -3, -2, -1, 1, 2, 3, 10, 20])
_OFTEN = np.array([1, 3, 2, 4, 8, 8, 4, 2, 3, 1]) / 36
_VERDICTS = ("correct", "wrong", "unparsable", "")
_CORRECT, _WRONG, _UNPARSABLE, _NO_VERDICT = range(4)

Tables = tuple[pa.Table, pa.Table]
"""Trajectories and their scores."""
Behaviour = Callable[["Layout"], Floats]
"""Computes the logprobs of all tokens of a data set, [T]; values of tokens that were not sampled are ignored."""


@cache
def settings(run: str, *overrides: str) -> Config:
    """Return the demo's configuration for a run of this name."""
    return load("demo", [f"run.name={run}", f"sampling.max_new_tokens={LIMIT}", *overrides])


def sums(high: int, count: int | None = None, split: str = "train") -> list[Problem]:
    """Make problems like `What is 31 + 8?` with operands up to `high`."""
    return generate(
        ArithmeticSource.model_validate(
            {"kind": "arithmetic", "split": split, "high": high, "operators": ["+"], "count": count}
        )
    )


class Language:
    """All texts of the episodes of some problems, each encoded once as a piece.

    The pieces, in this order: an empty one, the prompts, feedback after a complete answer and after a cut one, the
    evasive answer, the cut answer, and the numbers from `low` on.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Problem]) -> None:
        chat = Chat(tokenizer)
        self.chat, self.problems = chat, list(problems)
        self.golds: Ints = np.array([int(problem.solutions[0]) for problem in problems])
        self.rates = 0.3 + 0.5 * np.random.default_rng(0).random(len(problems))  # success rate of the first turn
        self.low = int(self.golds.min() + _MISTAKES.min())
        numbers = range(self.low, int(self.golds.max() + _MISTAKES.max()) + 1)
        self.answers = [EVASIVE, CUT, *(rf"\boxed{{{number}}}" for number in numbers)]
        prompts = [chat.prompt([{"role": "user", "content": problem.prompt}]) for problem in problems]
        answers = [chat.encode(text + ("" if text == CUT else "<|im_end|>")) for text in self.answers]
        assert len(answers[1]) == LIMIT, "the tokenizer knows a word of the cut answer"
        question = [{"role": "user", "content": problems[0].prompt}]
        feedback = [chat.next_prompt(question, answer, WRONG_FEEDBACK).token_ids for answer in answers[:2]]
        pieces = [[], *prompts, *feedback, *answers]
        self.feedback = 1 + len(problems)  # index of the feedback after a complete answer; after a cut one: the next
        self.first_answer = self.feedback + 2
        self.sizes: Ints = np.array([len(piece) for piece in pieces])
        self.begins = np.cumsum(self.sizes) - self.sizes
        self.ids = np.array([token for piece in pieces for token in piece], np.int32)

    def number(self, values: Ints) -> Ints:
        """Return the indices of the answers with these numbers."""
        return values - self.low + 2


@dataclass(frozen=True)
class Layout:
    """The token columns of N rows with T tokens in all.

    Each row has four pieces: prompt, answer, feedback, answer.
    """

    ends: Ints  # [N, 4], end of each piece in its row
    offsets: npt.NDArray[np.int32]  # [N + 1], start of each row
    token_ids: npt.NDArray[np.int32]  # [T]
    sampled: Bools  # [T]


def lay(language: Language, pieces: Ints) -> Layout:
    """Gather the tokens of all rows from their pieces, [N, 4]."""
    sizes = language.sizes[pieces].ravel()
    begins = np.cumsum(sizes) - sizes
    places = np.arange(sizes.sum()) + np.repeat(language.begins[pieces].ravel() - begins, sizes)
    sampled = np.tile([False, True], 2 * len(pieces))
    ends = language.sizes[pieces].cumsum(axis=1)
    offsets = np.concatenate([[0], ends[:, -1].cumsum()]).astype(np.int32)
    return Layout(ends, offsets, language.ids[places], np.repeat(sampled, sizes))


@dataclass(frozen=True)
class Episodes:
    """The events of N episodes, from which rows are made. -1 means that the turn was not played."""

    problem: Ints  # N, index of the language's problems
    sample: Ints  # N
    answer: Ints  # [N, 2], index of the language's answers
    verdict: Ints  # [N, 2], verdict of the environment, index of `_VERDICTS`
    scored: Ints  # [N, 2], verdict of the score stage, index of `_VERDICTS`


def play(language: Language, groups: Ints, rng: np.random.Generator, size: int = GROUP) -> Episodes:
    """Draw episodes: stable success rates, mistakes near the right number, and few evasive, cut or failed episodes."""
    problem, sample = np.repeat(groups, size), np.tile(np.arange(size), len(groups))
    chosen = rng.integers(size, size=len(groups) if size > 1 else 0) + size * np.arange(len(groups) if size > 1 else 0)
    first, scored = _answers(language, problem, language.rates[problem], rng)
    first[chosen], scored[chosen] = language.number(language.golds[problem[chosen]]), _CORRECT  # one episode solves it
    failed, late = (rng.random((2, len(problem))) < 0.002) & (scored != _CORRECT)
    again = (scored != _CORRECT) & ~failed & ~late
    second, scored_again = _answers(language, problem, np.full(len(problem), 0.4), rng)
    repeats = rng.random(len(problem)) < 0.3
    second, scored_again = np.where(repeats, first, second), np.where(repeats, scored, scored_again)
    first, scored = np.where(failed, -1, first), np.where(failed, -1, scored)
    second, scored_again = np.where(again, second, -1), np.where(again, scored_again, -1)
    verdict = np.where(late & ~failed, _NO_VERDICT, scored)
    answer, scored = np.stack([first, second], 1), np.stack([scored, scored_again], 1)
    return Episodes(problem, sample, answer, np.stack([verdict, scored_again], 1), scored)


def _answers(
    language: Language, problem: Ints, rates: npt.NDArray[np.float64], rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Draw an answer for each episode; return the answers and their verdicts."""
    count, golds = len(problem), language.golds[problem]
    right, odd = rng.random(count) < rates, rng.random(count)
    number = language.number(golds + np.where(right, 0, rng.choice(_MISTAKES, count, p=_OFTEN)))
    answer = np.where(~right & (odd < 0.02), 0, np.where(~right & (odd > 0.98), 1, number))
    return answer, np.where(right, _CORRECT, np.where(answer < 2, _UNPARSABLE, _WRONG))


@dataclass(frozen=True)
class Identity:
    """The values that all rows of a data set share."""

    name: str  # prefix of the ids
    run: str
    iteration: int
    policy: str
    policy_version: int
    problem_set: str
    temperature: float = 1.0


class Weights:
    """The logprobs of a policy's weights; each distinct row is computed once."""

    def __init__(self, folder: Path) -> None:
        from configs.train import PPO
        from tasks.train.policy import load_policy

        self._model = load_policy(folder, PPO(device="cpu", threads=1))
        self._known: dict[bytes, Floats] = {}

    def behaviour(self, rows: Layout) -> Floats:
        """Compute the logprobs of all tokens of a data set, [T]; they are 0 for tokens that were not sampled."""
        bounds = rows.offsets[1:-1]
        return np.concatenate(self.of(np.split(rows.token_ids, bounds), np.split(rows.sampled, bounds)))

    def of(
        self, token_ids: Sequence[npt.NDArray[np.int32]], sampled: Sequence[Bools], temperature: float = 1.0
    ) -> list[Floats]:
        """Compute the logprobs of each row."""
        name = str(temperature).encode()
        keys = [name + ids.tobytes() + mask.tobytes() for ids, mask in zip(token_ids, sampled, strict=True)]
        new = {
            key: (ids, mask) for key, ids, mask in zip(keys, token_ids, sampled, strict=True) if key not in self._known
        }
        ordered = sorted(new, key=lambda key: len(new[key][0]))
        for start in range(0, len(ordered), 256):
            part = ordered[start : start + 256]
            self._known |= zip(part, self._compute([new[key] for key in part], temperature), strict=True)
        return [self._known[key] for key in keys]

    def _compute(self, rows: Sequence[tuple[npt.NDArray[np.int32], Bools]], temperature: float) -> list[Floats]:
        import torch

        from tasks.train.batches import Places, Rows
        from tasks.train.passes import action_logprobs

        tokens = np.zeros((len(rows), max(2, *(len(ids) for ids, _ in rows))), np.int64)
        sampled = np.zeros(tokens.shape, np.bool_)
        for number, (ids, mask) in enumerate(rows):
            tokens[number, : len(ids)], sampled[number, : len(ids)] = ids, mask
        places = Places.padded(*(torch.from_numpy(axis) for axis in np.nonzero(sampled)))
        with torch.no_grad():
            logprobs, _ = action_logprobs(self._model, Rows(torch.from_numpy(tokens)), places, temperature)
        padded = np.zeros(tokens.shape, np.float32)
        padded[sampled] = logprobs.numpy()
        return [values[: len(ids)] for values, (ids, _) in zip(padded, rows, strict=True)]


def tables(
    language: Language,
    identity: Identity,
    episodes: Episodes,
    rng: np.random.Generator,
    behaviour: Behaviour | None = None,
) -> Tables:
    """Make rows of trajectories and of scores, in the order of the episodes; without a model logprobs are random."""
    answer = episodes.answer
    texts = np.where(answer < 0, 0, answer + language.first_answer)
    prompt = np.where(answer[:, 0] < 0, 0, episodes.problem + 1)
    feedback = np.where(answer[:, 1] < 0, 0, language.feedback + (answer[:, 0] == 1))
    rows = lay(language, np.stack([prompt, texts[:, 0], feedback, texts[:, 1]], 1))
    names = pa.array([f"{identity.name}/{problem.problem_id}/" for problem in language.problems])
    samples = pa.array([str(sample) for sample in range(int(episodes.sample.max()) + 1)])
    join: Any = pc.binary_join_element_wise
    ids = join(_take(names, episodes.problem), _take(samples, episodes.sample), "")
    logprobs = behaviour(rows) if behaviour else -rng.exponential(0.3, len(rows.token_ids)).astype(np.float32)
    columns = _tokens(rows, logprobs, identity.policy_version) | _common(identity, len(ids))
    columns |= _status(episodes) | _problems(language, episodes.problem)
    columns |= {
        "trajectory_id": ids,
        "sample": pa.array(episodes.sample, pa.int32()),
        "turns": _turns(language, episodes, rows, rng),
        "seed": pa.array(rng.integers(2**31, size=len(ids)), pa.int64()),
        "started_at": pa.array(STARTED_AT + 60 * identity.iteration + rng.random(len(ids)), pa.float64()),
        "latency_s": pa.array(0.2 + rng.random(len(ids)), pa.float32()),
    }
    return (
        pa.table({field.name: columns[field.name] for field in TRAJECTORY_SCHEMA}, schema=TRAJECTORY_SCHEMA),
        _scores(language, episodes, ids),
    )


def _take(values: Any, indices: Ints) -> Any:
    """Take rows of an array or a table; the stubs know only some types of both."""
    return values.take(pa.array(indices))


def _tokens(rows: Layout, logprobs: Floats, version: int) -> dict[str, Any]:
    count = len(rows.offsets) - 1
    values = {
        "token_ids": pa.array(rows.token_ids),
        "action_mask": pa.array(rows.sampled),
        "logprobs": pa.array(np.where(rows.sampled, logprobs, np.float32(0))),
        "versions": pa.array(np.where(rows.sampled, version, -1).astype(np.int32)),
    }
    columns = {name: _lists(rows.offsets, column) for name, column in values.items()}
    return columns | {
        "sequence_starts": _lists(np.arange(count + 1, dtype=np.int32), pa.array(np.zeros(count, np.int32)))
    }


def _lists(offsets: npt.NDArray[np.int32], values: Any) -> Any:
    make: Any = pa.ListArray.from_arrays
    return make(pa.array(offsets), values)


_PER_TURN = ("calls", "ungraded", "follows", "reward_parts", "answers", "limits", "received", "asked", "paid")


def _common(identity: Identity, count: int) -> dict[str, Any]:
    sampling = f'{{"temperature": {identity.temperature}, "top_p": 1.0, "top_k": 0, "max_new_tokens": {LIMIT}}}'
    values: dict[str, Any] = {
        "run": identity.run,
        "iteration": identity.iteration,
        "turn_discount": 1.0,
        "problem_set": identity.problem_set,
        "policy": identity.policy,
        "policy_version": identity.policy_version,
        "sampling": sampling,
        "agent": "math-multi-turn",
        "agent_args": '{"num_turns": 2}',
        "environment": "math-verify",
        "environment_args": "{}",
        "unplayed_turns": 0,
        **{"source": "arithmetic", "metadata": "{}"},
        "fault": "",
        **{name: [] for name in _PER_TURN},
    }
    return {
        name: pa.repeat(pa.scalar(value, TRAJECTORY_SCHEMA.field(name).type), count) for name, value in values.items()
    }


def _status(episodes: Episodes) -> dict[str, Any]:
    failed = (episodes.answer[:, 0] < 0) | (episodes.verdict[:, 0] == _NO_VERDICT)
    last = np.where(episodes.answer[:, 1] < 0, episodes.answer[:, 0], episodes.answer[:, 1])
    status = np.where(failed, 2, last == 1)
    reasons = ["", "the last turn reached sampling.max_new_tokens", "deadline of 600 s"]
    return {
        "status": _take(pa.array(["completed", "truncated", "failed"]), status),
        "reason": _take(pa.array(reasons), status),
    }


def _problems(language: Language, problem: Ints) -> dict[str, Any]:
    table = to_table(language.problems, PROBLEM_SCHEMA).select(["problem_id", "prompt", "solutions"])
    taken = _take(table, problem).combine_chunks()
    return {name: taken[name].chunk(0) for name in taken.column_names}


def _turns(language: Language, episodes: Episodes, rows: Layout, rng: np.random.Generator) -> Any:
    row, turn = np.nonzero(episodes.answer >= 0)
    answer, verdict = episodes.answer[row, turn], episodes.verdict[row, turn]
    continued = (turn == 0) & (episodes.answer[row, 1] >= 0)
    group_seeds = rng.integers(2**30, size=len(episodes.problem))[row - episodes.sample[row]]
    seeds = np.where(turn == 0, group_seeds + episodes.sample[row], rng.integers(2**30, 2**31, size=len(row)))
    fields = {
        "start": pa.array(rows.ends[row, 2 * turn], pa.int32()),
        "end": pa.array(rows.ends[row, 2 * turn + 1], pa.int32()),
        "text": _take(pa.array(language.answers), answer),
        "verdict": _take(pa.array(_VERDICTS), verdict),
        "reward": pa.array(verdict == _CORRECT).cast(pa.float32()),
        "finish_reason": _take(pa.array(["stop", "length"]), (answer == 1).astype(np.int64)),
        "feedback": _take(pa.array(["", WRONG_FEEDBACK]), continued.astype(np.int64)),
        "latency_s": pa.array(0.1 + 0.1 * rng.random(len(row)), pa.float32()),
        "seed": pa.array(seeds, pa.int64()),
    }
    counts = (episodes.answer >= 0).sum(axis=1)
    offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    struct: Any = pa.StructArray.from_arrays
    kind = TRAJECTORY_SCHEMA.field("turns").type.value_type
    return _lists(offsets, struct(list(fields.values()), fields=list(kind)))


def _scores(language: Language, episodes: Episodes, ids: Any) -> pa.Table:
    row, turn = np.nonzero(episodes.answer >= 0)
    answer, verdict = episodes.answer[row, turn], episodes.scored[row, turn]
    read = ["", "", *(text[len(r"\boxed{") : -1] for text in language.answers[2:])]
    reasons = [f"no expression in answer {text!r}" for text in language.answers[:2]] + [""]
    columns = {
        "trajectory_id": _take(ids, row),
        "turn": pa.array(turn, pa.int32()),
        "verdict": _take(pa.array(_VERDICTS), verdict),
        "success": (success := pa.array(verdict == _CORRECT).cast(pa.float32())),
        "extracted": _take(pa.array(read), answer),
        "solution": _take(pa.array([problem.solutions[0] for problem in language.problems]), episodes.problem[row]),
        "reason": _take(pa.array(reasons), np.minimum(answer, 2)),
        "reward": success,
        "parts": pa.repeat(pa.scalar([], SCORE_SCHEMA.field("parts").type), len(row)),
    }
    return pa.table(columns, schema=SCORE_SCHEMA)


def commit_problems(store: Store, problems: Sequence[Problem]) -> str:
    """Commit a problem set if it is new; return its version."""
    version = layout.problems(fingerprint(problems))
    if not manifests.committed(store, version):
        commit(store, version, "problems", to_table(list(problems), PROBLEM_SCHEMA), [], settings("problems"))
    return version


def commit_policy(store: Store, config: Config, number: int, model: Path, canary: Canary) -> str:
    """Commit a checkpoint of the run `config.run.name`, and the run if it is new; return the checkpoint's version."""
    run, version = layout.run(config.run.name), layout.checkpoint(config.run.name, number)
    if not manifests.committed(store, run):
        with Draft(store, run, "run") as draft:
            draft.commit(_provenance(config), [])
    checkpoints.commit(store, version, model, None, canary, _provenance(config), [run], {})
    return version


def commit_iteration(store: Store, config: Config, iteration: int, parents: list[str], rows: Tables) -> tuple[str, str]:
    """Commit trajectories and scores of an iteration; return their versions."""
    name = config.run.name
    trajectories = layout.trajectories(name, iteration)
    scores = layout.scores(name, iteration, scorer_fingerprint(config.score))
    commit(store, trajectories, "trajectories", rows[0], parents, config)
    commit(store, scores, "scores", rows[1], [trajectories], config)
    return trajectories, scores


def commit(
    store: Store,
    version: str,
    kind: manifests.Kind,
    table: pa.Table,
    parents: Sequence[str],
    config: Config,
    rows_per_shard: int = 25_000,
) -> None:
    """Commit a data set of these rows."""
    with Draft(store, version, kind) as draft:
        for number, start in enumerate(range(0, table.num_rows, rows_per_shard)):
            part = table.slice(start, rows_per_shard)
            path = draft.scratch / f"part-{number:05d}.parquet"
            write_parquet(part, path)
            draft.add(path, path.name, part.num_rows)
            path.unlink()
        draft.commit(_provenance(config), parents)


def _provenance(config: Config) -> Provenance:
    return Provenance(config=config.model_dump(mode="json"))


def write_run(store: Store, name: str, rows: int, rows_per_set: int = 10_000) -> list[str]:
    """Commit a scored run of `rows` trajectories, by a policy with a tokenizer but no weights; return the versions."""
    from safetensors.numpy import save_file
    from transformers import Qwen3Config

    from tasks.warm_start.tokenizer import build_tokenizer

    config, problems = settings(name), sums(99)
    tokenizer = build_tokenizer([*(problem.prompt for problem in problems), r"\boxed", WRONG_FEEDBACK])
    language, problem_set = Language(tokenizer, problems), commit_problems(store, problems)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(folder)
        save_file({"nothing": np.zeros(1, np.float32)}, f"{folder}/model.safetensors")
        policies = [
            commit_policy(store, config, iteration, Path(folder), Canary([1, 2], [-1.0]))
            for iteration in range(-(-rows // rows_per_set))
        ]
    versions = []
    for iteration, policy in enumerate(policies):
        rng = np.random.default_rng(iteration)
        groups = min(rows_per_set, rows - iteration * rows_per_set) // GROUP
        drawn = rng.permutation(len(problems))[:groups]
        identity = Identity(f"{name}/{iteration:06d}", name, iteration, policy, iteration, problem_set)
        made = tables(language, identity, play(language, drawn, rng), rng)
        versions.append(commit_iteration(store, config, iteration, [policy, problem_set], made)[0])
    return versions
