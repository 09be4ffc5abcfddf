r"""Faults of trajectories in practice, each planted into an otherwise clean run.

`FAULTS` is the table of them: the check that must find a fault, and a function that changes the
run's rows before they are committed (`plant`) or damages the store afterwards (`damage`). It returns the ids that must
be among the cases of the check. The comment above a fault describes the event.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.audit import Checks
from storage import layout
from storage.objects.store import Store
from storage.records import Call, CallStatus, Trajectory
from tasks.agents.math_multi_turn import CORRECT_FEEDBACK
from tests.support.audit_scene import Scene, grade, logprobs, say
from tests.support.chain_helpers import SHARD, key, rewrite, rewrite_shard

GROUPS = 8  # in a run with a fault
STALENESS = "rollout.max_head_offpolicyness"

Ids = Iterable[str]
Plant = Callable[[Scene], Ids]
Where = Callable[[Scene], list[Trajectory]]
"""Chooses rows."""


@dataclass(frozen=True)
class Fault:
    """One fault and the check that must find it."""

    check: str  # check that must find it
    plant: Plant | None = None
    damage: Plant | None = None
    policies: Sequence[int] = (0,)  # policy version of each iteration
    overrides: Sequence[str] = ()  # overrides of the run's configuration
    also: Sequence[str] = ()  # checks that find a consequence of it
    alone: bool = False  # audit its run alone, because the check reads few data sets or computes one share over all
    name: str = ""  # of its run


def ids(rows: Iterable[Trajectory]) -> list[str]:
    return [row.trajectory_id for row in rows]


def names(rows: Iterable[Trajectory]) -> list[str]:
    return [row.problem_id for row in rows]


def gold(row: Trajectory) -> int:
    return int(row.solutions[0])


def boxed(number: object) -> str:
    return rf"\boxed{{{number}}}"


def answered(row: Trajectory, verdict: str = "correct") -> bool:
    """Return whether the first turn has this verdict."""
    return bool(row.turns) and row.turns[0].verdict == verdict


# Which rows


def chosen(test: Callable[[Trajectory], bool], groups: int = GROUPS) -> Where:
    """Choose rows of the first data set, in its first groups."""
    return lambda scene: [row for group in range(groups) for row in scene.group(group) if test(row)]


def two_mistakes(scene: Scene) -> list[Trajectory]:
    """Choose a row with two wrong turns, of the last data set."""
    rows = [row for row in scene.sets[-1].rows if [turn.verdict for turn in row.turns] == ["wrong", "wrong"]]
    return rows[:1]


def callers(scene: Scene) -> list[Trajectory]:
    """Choose a sixteenth of the episodes, in which the policy is to call a tool."""
    return [row for row in scene.rows if row.turns and row.sample == 7]


right, wrong = chosen(answered), chosen(lambda row: answered(row, "wrong"))
right_of_one, first_group = chosen(answered, groups=1), chosen(lambda row: bool(row.turns), groups=1)


def every(number: int, remainder: int = 0) -> Where:
    """Choose rows by their sample that are right at once."""
    return chosen(lambda row: row.sample % number == remainder and answered(row))


def later(scene: Scene) -> list[Trajectory]:
    return [row for row in scene.sets[1].rows if row.sample > 1 and answered(row)]


def every_fourth(scene: Scene) -> list[Trajectory]:
    return [row for row in scene.rows if row.sample % 4 == 1]


def odd_samples(rows: list[Trajectory]) -> Ids:
    return ids(row for row in rows if row.sample % 2)


def unnamed(where: Where) -> Where:
    """Choose those whose gold answer is not in the prompt."""
    return lambda scene: [row for row in where(scene) if row.solutions[0] not in row.prompt]


# What is done with them


def edited(where: Where = two_mistakes, **columns: Callable[[Trajectory], Any]) -> Plant:
    """Change columns of rows."""

    def plant(scene: Scene) -> Ids:
        return ids(scene.change(row, **{name: of(row) for name, of in columns.items()}) for row in where(scene))

    return plant


def first_turn(where: Where, **columns: Callable[[Trajectory], Any]) -> Plant:
    """Change columns of first turns."""
    return edited(where, turns=lambda row: say(row, 0, **{name: of(row) for name, of in columns.items()}).turns)


def texts(row: Trajectory) -> dict[str, str]:
    """Return what `replayed` may write into an answer, by name."""
    numbers = {"right": 0, "next": 1 + row.sample, "above": row.sample, "below": -row.sample, "odd": row.sample % 2}
    numbers |= {"near": 4 + row.sample % 2}
    return {name: boxed(gold(row) + number) for name, number in numbers.items()} | {"prompt": row.prompt}


def replayed(
    where: Where,
    *answers: str,
    found: Callable[[list[Trajectory]], Ids] = ids,
    calls: Callable[[Trajectory], list[Call]] = lambda _: [],
    **options: Any,
) -> Plant:
    """Replay episodes: the policy makes these calls, then gives these answers, with `texts` in them."""

    def plant(scene: Scene) -> Ids:
        rows = where(scene)
        for row in rows:
            made = calls(row)
            said = [answer.format(**texts(row)) for answer in answers]
            scene.replay(row, *map(written, made), *said, calls=made, **options)
        return found(rows)

    return plant


def hide(row: Trajectory) -> str:
    return row.turns[0].text.replace("{", "{\u200b")


def data_set(iteration: int) -> Callable[[list[Trajectory]], Ids]:
    return lambda rows: [layout.trajectories(rows[0].run, iteration)]


def logprob(value: float, offset: int = 0) -> Plant:
    """Change the logprob of one token, `offset` tokens after the start of the first turn."""

    def column(row: Trajectory) -> list[float]:
        position = row.turns[0].start + offset
        return [*row.logprobs[:position], value, *row.logprobs[position + 1 :]]

    return edited(logprobs=column)


def again(rows: Iterable[Trajectory], scene: Scene, **options: Any) -> list[Trajectory]:
    """Replay the rows that have turns with the same answers and other options of `play`; return them."""
    rows = [row for row in rows if row.turns]
    for row in rows:
        scene.replay(row, *(turn.text for turn in row.turns), cut=row.status == "truncated", **options)
    return rows


def call(
    output: str, arguments: str = "{}", name: str = "calculator", status: CallStatus = "answered", turn: int = 0
) -> Call:
    return Call(turn, f"call-{turn}", name, arguments, output, status)


def written(call: Call) -> str:
    """Return a call as the policy writes it."""
    if call.status == "unparsable":
        return call.arguments
    return f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'


def calculation(row: Trajectory, status: CallStatus = "answered", output: str = "") -> list[Call]:
    expression = row.prompt.removeprefix("What is ").removesuffix("?")
    return [call(output or str(gold(row)), f'{{"expression": "{expression}"}}', status=status)]


# Faults that need more than a line


def flip_byte(store: Store, version: str, name: str = SHARD) -> str:
    """Change a byte of a version's shard; return its path."""
    data = bytearray(store.read(path := key(store, version, name)))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))
    return path


def raise_schema(scene: Scene) -> Ids:
    newer = {"kind": "trajectories", "schema_version": "99"}
    rewrite_shard(scene.cast.store, scene.version(0), lambda rows: rows.replace_schema_metadata(newer))
    return [key(scene.cast.store, scene.version(0), SHARD)]


def change_parent(scene: Scene) -> Ids:
    rewrite(scene.cast.store, scene.problem_set, lambda values: values.update(metrics={"problems": 1}))
    return [layout.manifest(scene.problem_set)]


def write_twice(scene: Scene) -> Ids:
    scene.rows.extend(twice := scene.group(0)[:4])
    return ids(twice)


def forget_second_turns(scene: Scene) -> Ids:
    scene.sets[0].scores = [score for score in scene.scores if score.turn == 0]
    return ids(row for row in scene.rows if len(row.turns) > 1)


def filter_rows(scene: Scene) -> Ids:
    rows = scene.group(0)
    for row in rows:
        scene.rows.remove(row)
    return ids(row for row in rows if row.turns)


def score_twice(scene: Scene) -> Ids:
    scene.scores.extend(twice := scene.scores[:5])
    return {score.trajectory_id for score in twice}


def serve_other_weights(scene: Scene) -> Ids:
    drifted = []
    for row, others in zip(list(scene.rows), logprobs(scene.cast.checkpoints[1].model, scene.rows), strict=True):
        scene.change(row, logprobs=others)
        nats = sum(abs(one - other) for one, other in zip(row.logprobs, others, strict=True))
        if nats > 1.01 * Checks().logprob_drift.threshold * sum(row.action_mask):
            drifted.append(row.trajectory_id)
    return drifted


def fail(scene: Scene) -> Ids:
    rows = [row for row in scene.rows if row.sample % 8 == 0]
    nothing: dict[str, list[object]] = {"token_ids": [], "action_mask": [], "logprobs": [], "versions": [], "turns": []}
    for row in rows:
        scene.unscore(row)
        scene.change(row, status="failed", reason="deadline of 600 s", **nothing)
    return ids(rows)


def time_out(scene: Scene) -> Ids:
    rows = [row for row in wrong(scene) if row.sample % 4 == 0]
    for row in rows:
        position = next(n for n, score in enumerate(scene.scores) if score.trajectory_id == row.trajectory_id)
        scene.scores[position] = replace(scene.scores[position], verdict="timeout", extracted="", reason="too slow")
    return ids(rows)


def join_turns(scene: Scene) -> Ids:
    rows = callers(scene)
    for row in rows:
        made = calculation(row)
        played = scene.replay(row, *map(written, made), boxed(gold(row)), calls=made)
        start, end = played.turns[0].start, played.turns[1].end
        text = scene.cast.chat.decode(played.token_ids[start:end])
        mask = [start <= position < end for position in range(end)]
        whole = replace(played.turns[1], start=start, text=text, seed=played.turns[0].seed)
        versions = [0 if sampled else -1 for sampled in mask]
        scene.record(played, replace(played, turns=[whole], action_mask=mask, versions=versions, ungraded=[]))
    return ids(rows)


def state_gold(scene: Scene) -> Ids:
    problem = scene.problems[0]
    rows = scene.change_problem(0, prompt=f"{problem.prompt} The answer is {problem.solutions[0]}.")
    return names(again(rows, scene))


def cut_gold_out(scene: Scene) -> Ids:
    return names(again(scene.change_problem(0, solutions=[r"\boxed{}"]), scene, grade=lambda *_: "error"))


def mistype_gold(scene: Scene) -> Ids:
    agreed = int(scene.problems[0].solutions[0])
    rows = scene.change_problem(0, solutions=[str(agreed + 100)])
    for row in rows:
        scene.replay(row, boxed(agreed if row.sample % 8 else agreed - 1), boxed(agreed))
    return names(rows)


def evaluate_on_training(scene: Scene) -> Ids:
    scene.evaluated = [scene.problems[0], *scene.cast.held_out]
    return names(scene.group(0))


def from_first_turn(row: Trajectory) -> list[bool]:
    return [position >= row.turns[0].start for position in range(len(row.token_ids))]


def turned_back(row: Trajectory) -> list[int]:
    end = row.turns[0].end
    return [*row.versions[: end - 2], 0, 0, *row.versions[end:]]


def grade_boxes_only(answer: str, solutions: Sequence[str]) -> str:
    return grade(answer, solutions) if answer.startswith("\\") else "wrong"


def searched(row: Trajectory) -> list[Call]:
    return [call(f"{row.prompt} The answer is {gold(row)}.", f'{{"query": "{row.prompt}"}}', "search")]


NO_RESULT = [call("no result", '{"query": "sums"}', "search", turn=turn) for turn in range(4)]
DOWN = "error: the server does not answer"
LONG = "First I add the tens, then the ones: {right}"

_TABLE = [
    # A disk returned one wrong byte of a shard.
    Fault("damaged_objects", damage=lambda scene: [flip_byte(scene.cast.store, scene.version(0))]),
    # A newer version of this package wrote the rows.
    Fault("wrong_schema", damage=raise_schema, also=["broken_parents"]),
    # The problem set's manifest was written again after the rollout.
    Fault("broken_parents", damage=change_parent),
    # A retried upload wrote some rows of a shard twice.
    Fault("duplicate_ids", write_twice, also=["repeated_seeds"]),
    # The score stage of an older version graded only the first turn.
    Fault("unscored_turns", forget_second_turns),
    # A group was removed after it was scored.
    Fault("orphan_scores", filter_rows),
    # Two attempts to score wrote into one version.
    Fault("orphan_scores", score_twice),
    # The mask covers feedback as if the policy had sampled it.
    Fault("mask_and_spans", edited(action_mask=from_first_turn)),
    # The engine returned no version for the last token.
    Fault("mask_and_spans", edited(versions=lambda row: row.versions[:-1])),
    # The answers of one episode came back in another order than its requests.
    Fault("broken_prefix", edited(turns=lambda row: row.turns[::-1])),
    # The sampler divided 0 by 0.
    Fault("bad_logprobs", logprob(math.nan)),
    # A logit was stored instead of a logprob.
    Fault("bad_logprobs", logprob(3.5)),
    # The server's prompt logprobs were stored as well.
    Fault("bad_logprobs", logprob(-2.0, -1)),
    # A request moved in the middle of a turn to a replica that still had the old weights.
    Fault("falling_versions", edited(versions=turned_back), policies=(0, 1), overrides=[f"{STALENESS}=1"]),
    # The server numbers its weights differently from the run.
    Fault("falling_versions", edited(versions=lambda row: [7 if each >= 0 else -1 for each in row.versions])),
    # Answers were stored after post-processing instead of as sampled.
    Fault("text_differs", first_turn(right_of_one, text=lambda row: f"The answer is {boxed(gold(row))}")),
    # The agent got a system prompt in the middle of the run.
    Fault("template_drift", lambda scene: ids(again(scene.sets[1].rows, scene, system="Think.")), policies=(0, 1)),
    # The server served other weights than it was given.
    Fault("logprob_drift", serve_other_weights, alone=True),
    # The new weights never reached the server, so the policy of the iteration before played the next one.
    Fault("staleness", lambda scene: ids(row for row in scene.sets[1].rows if row.turns), policies=(0, 0)),
    # After a too large update nearly all answers are wrong.
    Fault("success_drift", replayed(later, "{above}", "{below}", found=data_set(1)), policies=(0, 1)),
    # The agent continues after a right answer, and the policy changes its answer.
    Fault("broken_answers", replayed(right, "{right}", "{odd}", found=odd_samples, feedback=CORRECT_FEEDBACK)),
    # Every episode solves its problem.
    Fault("zero_variance", replayed(chosen(lambda _: True), "{right}", found=names)),
    # The engine answered all requests of a group with one sample.
    Fault("identical_answers", replayed(chosen(lambda _: True, groups=4), LONG, found=names)),
    # The seed was derived from the problem without the sample.
    Fault("repeated_seeds", lambda scene: [*first_turn(first_group, seed=lambda _: 77)(scene)][1:]),
    # Long answers are right, so the policy will learn to write more.
    Fault("length_and_reward", replayed(right, LONG, found=data_set(0))),
    # `sampling.max_new_tokens` cuts many episodes.
    Fault("truncated", replayed(every(3), "{right} so", cut=True)),
    # A replica hung, and its episodes reached their deadline.
    Fault("failed", fail),
    # The policy repeats itself.
    Fault("loops", replayed(right_of_one, "1 + 1 = 2, " * 8 + "{right}")),
    # The policy has unlearned the answer format.
    Fault("unparsable", replayed(wrong, "I am not sure.", "It is hard to say."), also=["length_and_reward"]),
    # The verifier's machine was overloaded, so comparisons took too long.
    Fault("verdict_failures", time_out),
    # Another writer took everything after the prompt for one completion.
    Fault("tool_output_in_loss", join_turns),
    # The agent ends the episode when the policy calls a tool.
    Fault("unanswered_calls", replayed(callers, calls=lambda _: [call("", status="unanswered")])),
    # The policy forgets the arguments' names.
    Fault("unparsable_calls", replayed(callers, "{right}", calls=lambda row: [call("", row.prompt, "", "unparsable")])),
    # The tool's server is down.
    Fault("tool_errors", replayed(every_fourth, "{right}", calls=lambda row: calculation(row, "failed", DOWN))),
    # The policy calls the same until it has no more turns.
    Fault("repeated_calls", replayed(callers, "{right}", calls=lambda _: NO_RESULT)),
    # The index of a search tool has the solutions of the training problems.
    Fault("leaked_by_tool", replayed(unnamed(callers), "{right}", calls=searched)),
    # The environment compares strings and rejects answers that the score stage accepts.
    Fault("verdicts_disagree", first_turn(right_of_one, verdict=lambda _: "wrong", reward=lambda _: 0.0)),
    # The verifier reads only answers that begin with the box and grades other right answers as wrong.
    Fault("false_negatives", replayed(every(2, 1), "It is {right}", "{next}", grade=grade_boxes_only), alone=True),
    # The verifier compares with a tolerance, so numbers near the right one count as right.
    Fault("false_positives", replayed(wrong, "{near}", grade=lambda *_: "correct"), alone=True),
    # The verifier computes what it reads, so an answer that repeats the question counts as right.
    Fault(
        "repeated_question",
        replayed(unnamed(every(4)), "To find {prompt}", grade=lambda *_: "correct"),
        also=["false_positives"],
    ),
    # The worked solution was appended to the problem.
    Fault("leaked_answers", state_gold),
    # The rule that extracts the gold answer from a worked solution takes the box without its content.
    Fault("unmatched_gold", cut_gold_out, also=["verdict_failures"]),
    # The gold answer has a typing error, and nearly all episodes agree on another answer.
    Fault("never_solved", mistype_gold),
    # A problem of the evaluation set is in the training set.
    Fault("contamination", evaluate_on_training),
    # The policy has memorised an access key.
    Fault("secrets", replayed(lambda scene: right(scene)[:1], "AK" + "IAQ3EGRZ7XWNB2PL5D {right}")),
    # The policy has memorised a card number.
    Fault("personal_data", replayed(lambda scene: right(scene)[:1], "card 4539 5787 6362 1486: {right}")),
    # An answer holds characters without width.
    Fault("hidden_characters", first_turn(two_mistakes, text=hide), also=["text_differs"]),
]
FAULTS = [replace(fault, name=f"{number:02}-{fault.check}") for number, fault in enumerate(_TABLE)]
