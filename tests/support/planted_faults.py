r"""Faults of trajectories in practice, each planted into an otherwise clean run.

Each fault has its own run with its name. A function changes the run's rows before they are committed (`@in_rows`), or
damages the store afterwards (`@in_store`). It returns the ids that must be among the cases of the check that finds the
fault. Its docstring describes the event.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.audit import Audit, Checks
from storage import layout
from storage.objects.store import Store
from storage.records import Call, CallStatus, Problem, Trajectory
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import Chat
from tasks.agents.math_multi_turn import CORRECT_FEEDBACK
from tasks.audit.results import CheckResult
from tasks.audit.run import audit
from tasks.score.verifier import Verifier
from tasks.tables.sets import select
from tests.support import audit_helpers as helpers
from tests.support.audit_scene import Cast, Scene, compute_logprobs, grade, logprobs, set_scene, spec_of
from tests.support.branching import Branching
from tests.support.chain_helpers import SHARD, key, rewrite, rewrite_shard

GROUPS = 12  # in a run with a fault
EVERYTHING = Audit(examples=1_000_000, recomputed=1000)  # all rows of up to three data sets
CLEAN, CLEAN_GROUPS = "clean", 24
HELD_OUT = 50  # problems of the evaluation

Ids = Iterable[str]
Plant = Callable[[Scene], Ids]


@dataclass(frozen=True)
class Fault:
    """One fault and the check that must find it."""

    name: str  # name of its run
    check: str  # check that must find it
    plant: Plant | None = None
    damage: Plant | None = None
    policies: Sequence[int] = (0,)  # policy version of each iteration
    overrides: Sequence[str] = ()  # overrides of the run's configuration
    also: frozenset[str] = frozenset()  # checks that find a consequence of it
    alone: bool = False  # audit its run alone, because the check reads few data sets or computes one share over all


FAULTS: list[Fault] = []


def in_rows(check: str, also: Sequence[str] = (), where: str = "plant", **options: Any) -> Callable[[Plant], Plant]:
    """Register a fault in the stored rows, with fields of `Fault`; the decorated function changes the scene."""

    def register(function: Plant) -> Plant:
        name = function.__name__.replace("_", "-")
        options[where] = function
        FAULTS.append(Fault(name, check, also=frozenset(also), **options))
        return function

    return register


in_store = partial(in_rows, where="damage")
"""Registers a fault of the store; the decorated function damages the store."""


def ids(rows: Iterable[Trajectory]) -> list[str]:
    return [row.trajectory_id for row in rows]


def names(rows: Iterable[Trajectory]) -> set[str]:
    return {row.problem_id for row in rows}


def gold(row: Trajectory) -> int:
    return int(row.solutions[0])


def boxed(number: object) -> str:
    return rf"\boxed{{{number}}}"


def two_mistakes(scene: Scene, number: int = 0) -> Trajectory:
    """Return a row with two wrong turns."""
    rows = [row for row in scene.sets[number].rows if [turn.verdict for turn in row.turns] == ["wrong", "wrong"]]
    return rows[0]


def answered(row: Trajectory, verdict: str = "correct") -> bool:
    """Return whether the first turn has this verdict."""
    return bool(row.turns) and row.turns[0].verdict == verdict


# Integrity


@in_store("damaged_objects")
def flipped_byte(scene: Scene) -> Ids:
    """A disk returned one wrong byte of a shard."""
    path = key(scene.cast.store, scene.version(0), SHARD)
    data = bytearray(scene.cast.store.read(path))
    data[len(data) // 2] ^= 1
    scene.cast.store.write(path, bytes(data))
    return [path]


@in_store("wrong_schema", also=["broken_parents"])
def newer_schema(scene: Scene) -> Ids:
    """A newer version of this package wrote the rows."""
    newer = {"kind": "trajectories", "schema_version": "99"}
    rewrite_shard(scene.cast.store, scene.version(0), lambda rows: rows.replace_schema_metadata(newer))
    return [key(scene.cast.store, scene.version(0), SHARD)]


@in_store("broken_parents")
def changed_parent(scene: Scene) -> Ids:
    """The problem set's manifest was written again after the rollout."""
    rewrite(scene.cast.store, scene.problem_set, lambda values: values.update(metrics={"problems": 1}))
    return [layout.manifest(scene.problem_set)]


@in_rows("duplicate_ids", also=["repeated_seeds"])
def rows_written_twice(scene: Scene) -> Ids:
    """A retried upload wrote some rows of a shard twice."""
    again = scene.group(0)[:4]
    scene.rows.extend(again)
    return ids(again)


@in_rows("unscored_turns")
def second_turns_unscored(scene: Scene) -> Ids:
    """The score stage of an older version graded only the first turn."""
    scene.sets[0].scores = [score for score in scene.scores if score.turn == 0]
    return ids(row for row in scene.rows if len(row.turns) > 1)


@in_rows("orphan_scores")
def rows_filtered_later(scene: Scene) -> Ids:
    """A group was removed after it was scored."""
    rows = scene.group(0)
    for row in rows:
        scene.rows.remove(row)
    return ids(row for row in rows if row.turns)


@in_rows("orphan_scores")
def scored_twice(scene: Scene) -> Ids:
    """Two attempts to score wrote into one version."""
    again = scene.scores[:5]
    scene.scores.extend(again)
    return {score.trajectory_id for score in again}


# Tokens


@in_rows("mask_and_spans")
def feedback_in_mask(scene: Scene) -> Ids:
    """The mask covers feedback as if the policy had sampled it."""
    row = two_mistakes(scene)
    begin = row.turns[0].start
    scene.change(row, action_mask=[position >= begin for position in range(len(row.token_ids))])
    return [row.trajectory_id]


@in_rows("mask_and_spans")
def short_column(scene: Scene) -> Ids:
    """The engine returned no version for the last token."""
    row = two_mistakes(scene)
    scene.change(row, versions=row.versions[:-1])
    return [row.trajectory_id]


@in_rows("broken_prefix")
def turns_out_of_order(scene: Scene) -> Ids:
    """The answers of one episode came back in another order than its requests."""
    row = two_mistakes(scene)
    scene.change(row, turns=row.turns[::-1])
    return [row.trajectory_id]


@in_rows("bad_logprobs")
def nan_logprob(scene: Scene) -> Ids:
    """The sampler divided 0 by 0."""
    return [_with_logprob(scene, math.nan)]


@in_rows("bad_logprobs")
def positive_logprob(scene: Scene) -> Ids:
    """A logit was stored instead of a logprob."""
    return [_with_logprob(scene, 3.5)]


@in_rows("bad_logprobs")
def prompt_logprobs(scene: Scene) -> Ids:
    """The server's prompt logprobs were stored as well."""
    return [_with_logprob(scene, -2.0, -1)]


def _with_logprob(scene: Scene, value: float, offset: int = 0) -> str:
    """Set one logprob of a row, `offset` tokens after the start of its first turn; return the row's id."""
    row = two_mistakes(scene)
    position = row.turns[0].start + offset
    scene.change(row, logprobs=[*row.logprobs[:position], value, *row.logprobs[position + 1 :]])
    return row.trajectory_id


@in_rows("falling_versions", policies=(0, 1), overrides=["rollout.max_head_offpolicyness=1"])
def version_falls(scene: Scene) -> Ids:
    """A request moved in the middle of a turn to a replica that still had the old weights."""
    row = two_mistakes(scene, 1)
    end = row.turns[0].end
    scene.change(row, versions=[*row.versions[: end - 2], 0, 0, *row.versions[end:]])
    return [row.trajectory_id]


@in_rows("falling_versions")
def version_of_the_future(scene: Scene) -> Ids:
    """The server numbers its weights differently from the run."""
    row = two_mistakes(scene)
    scene.change(row, versions=[7 if version >= 0 else version for version in row.versions])
    return [row.trajectory_id]


@in_rows("text_differs")
def tidied_text(scene: Scene) -> Ids:
    """Answers were stored after post-processing instead of as sampled."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.change_turn(row, 0, text=f"The answer is {boxed(gold(row))}")
    return ids(rows)


@in_rows("template_drift", policies=(0, 1))
def system_prompt_added(scene: Scene) -> Ids:
    """The agent got a system prompt in the middle of the run."""
    return ids(_replay_the_same(scene, scene.sets[1].rows, system="Think."))


# Policy


@in_rows("logprob_drift", alone=True)
def other_weights(scene: Scene) -> Ids:
    """The server served other weights than it was given."""
    drifted = []
    for row, others in zip(list(scene.rows), logprobs(scene.cast.checkpoints[1].model, scene.rows), strict=True):
        scene.change(row, logprobs=others)
        nats = sum(abs(one - other) for one, other in zip(row.logprobs, others, strict=True))
        if nats > 1.01 * Checks().logprob_drift.threshold * sum(row.action_mask):
            drifted.append(row.trajectory_id)
    return drifted


@in_rows("staleness", policies=(0, 0))
def old_policy(scene: Scene) -> Ids:
    """The new weights never reached the server, so the policy of the iteration before played the next one."""
    return ids(row for row in scene.sets[1].rows if row.turns)


# Learning


@in_rows("success_drift", policies=(0, 1))
def collapse(scene: Scene) -> Ids:
    """After a too large update nearly all answers are wrong."""
    for row in [row for row in scene.sets[1].rows if row.sample > 1 and answered(row)]:
        scene.replay(row, boxed(gold(row) + row.sample), boxed(gold(row) - row.sample))
    return [scene.version(1)]


@in_rows("broken_answers")
def talked_out_of_it(scene: Scene) -> Ids:
    """The agent continues after a right answer, and the policy changes its answer."""
    rows = [row for row in scene.rows if answered(row)]
    for number, row in enumerate(rows):
        scene.replay(row, boxed(gold(row)), boxed(gold(row) + number % 2), feedback=CORRECT_FEEDBACK)
    return ids(rows[1::2])


@in_rows("zero_variance")
def too_easy(scene: Scene) -> Ids:
    """Every episode solves its problem."""
    for row in list(scene.rows):
        scene.replay(row, boxed(gold(row)))
    return names(scene.rows)


@in_rows("identical_answers")
def one_answer_copied(scene: Scene) -> Ids:
    """The engine answered all requests of a group with one sample."""
    rows = [row for group in range(4) for row in scene.group(group)]
    for row in rows:
        scene.replay(row, f"First I add the tens, then the ones: {boxed(gold(row))}")
    return names(rows)


@in_rows("repeated_seeds")
def one_seed_for_all(scene: Scene) -> Ids:
    """The seed was derived from the problem without the sample."""
    rows = [row for row in scene.group(0) if row.turns]
    for row in rows:
        scene.change_turn(row, 0, seed=77)
    return ids(rows[1:])


@in_rows("length_and_reward")
def longer_is_right(scene: Scene) -> Ids:
    """Long answers are right, so the policy will learn to write more."""
    for row in [row for row in scene.rows if answered(row)]:
        scene.replay(row, f"I add up the tens and the ones of both: {boxed(gold(row))}")
    return [scene.version(0)]


# Episodes


@in_rows("truncated")
def limit_too_low(scene: Scene) -> Ids:
    """`sampling.max_new_tokens` cuts many episodes."""
    rows = [row for row in scene.rows if row.sample % 3 == 0 and answered(row)]
    for row in rows:
        scene.replay(row, f"{boxed(gold(row))} so", cut=True)
    return ids(row for row in scene.rows if row.status == "truncated")


@in_rows("failed")
def deadlines(scene: Scene) -> Ids:
    """A replica hung, and its episodes reached their deadline."""
    rows = [row for row in scene.rows if row.sample % 8 == 0]
    nothing: dict[str, list[object]] = {"token_ids": [], "action_mask": [], "logprobs": [], "versions": [], "turns": []}
    for row in rows:
        scene.unscore(row)
        scene.change(row, status="failed", reason="deadline of 600 s", **nothing)
    return ids(rows)


@in_rows("loops")
def endless_sums(scene: Scene) -> Ids:
    """The policy repeats itself."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.replay(row, "1 + 1 = 2, " * 8 + boxed(gold(row)))
    return ids(rows)


@in_rows("unparsable", also=["length_and_reward"])
def no_answer(scene: Scene) -> Ids:
    """The policy has unlearned the answer format."""
    rows = [row for row in scene.rows if answered(row, "wrong")]
    for row in rows:
        scene.replay(row, "I am not sure about it.", "It is hard to say.")
    return ids(rows)


@in_rows("verdict_failures")
def slow_judge(scene: Scene) -> Ids:
    """The verifier's machine was overloaded, so comparisons took too long."""
    rows = [row for row in scene.rows if row.sample % 4 == 0 and answered(row, "wrong")]
    for row in rows:
        position = next(n for n, score in enumerate(scene.scores) if score.trajectory_id == row.trajectory_id)
        scene.scores[position] = replace(scene.scores[position], verdict="timeout", extracted="", reason="too slow")
    return ids(rows)


# Tools


def call(
    output: str, arguments: str = "{}", name: str = "calculator", status: CallStatus = "answered", turn: int = 0
) -> Call:
    return Call(turn, f"call-{turn}", name, arguments, output, status)


def written(call: Call) -> str:
    """Return a call as the policy writes it."""
    return f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'


def calculate(scene: Scene, row: Trajectory, status: CallStatus = "answered", output: str = "") -> Trajectory:
    """Replay an episode in which the policy calculates the answer with a tool."""
    expression = row.prompt.removeprefix("What is ").removesuffix("?")
    made = call(output or str(gold(row)), f'{{"expression": "{expression}"}}', status=status)
    return scene.replay(row, written(made), boxed(gold(row)), calls=[made])


def callers(scene: Scene) -> list[Trajectory]:
    """Return the rows of a sixteenth of the episodes, in which the policy is to call a tool."""
    return [row for row in scene.rows if row.turns and row.sample == 7]


@in_rows("tool_output_in_loss")
def all_after_the_prompt(scene: Scene) -> Ids:
    """Another writer took everything after the prompt for one completion."""
    rows = callers(scene)
    for row in rows:
        played = calculate(scene, row)
        start, end = played.turns[0].start, played.turns[1].end
        text = scene.cast.chat.decode(played.token_ids[start:end])
        mask = [start <= position < end for position in range(end)]
        whole = replace(played.turns[1], start=start, text=text, seed=played.turns[0].seed)
        scene.record(
            played,
            replace(played, turns=[whole], action_mask=mask, versions=[0 if m else -1 for m in mask], ungraded=[]),
        )
    return ids(rows)


@in_rows("unanswered_calls")
def outputs_lost(scene: Scene) -> Ids:
    """The agent ends the episode when the policy calls a tool."""
    rows = callers(scene)
    for row in rows:
        made = call("", status="unanswered")
        scene.replay(row, written(made), calls=[made])
    return ids(rows)


@in_rows("unparsable_calls")
def calls_in_another_format(scene: Scene) -> Ids:
    """The policy forgets the arguments' names."""
    rows = callers(scene)
    for row in rows:
        text = "<tool_call>" + row.prompt + "</tool_call>"
        scene.replay(row, text, boxed(gold(row)), calls=[call("", text, "", "unparsable")])
    return ids(rows)


@in_rows("tool_errors")
def broken_tool(scene: Scene) -> Ids:
    """The tool's server is down."""
    rows = [row for row in scene.rows if row.sample % 4 == 1]
    for row in rows:
        calculate(scene, row, "failed", "error: the server does not answer")
    return ids(rows)


@in_rows("repeated_calls")
def again_and_again(scene: Scene) -> Ids:
    """The policy calls the same until it has no more turns."""
    rows = callers(scene)
    for row in rows:
        made = [call("no result", '{"query": "sums"}', "search", turn=turn) for turn in range(4)]
        scene.replay(row, *map(written, made), boxed(gold(row)), calls=made)
    return ids(rows)


@in_rows("leaked_by_tool")
def solutions_are_searched(scene: Scene) -> Ids:
    """The index of a search tool has the solutions of the training problems."""
    rows = [row for row in callers(scene) if row.solutions[0] not in row.prompt]
    for row in rows:
        made = call(f"{row.prompt} The answer is {gold(row)}.", f'{{"query": "{row.prompt}"}}', "search")
        scene.replay(row, written(made), boxed(gold(row)), calls=[made])
    return ids(rows)


# Verdicts


@in_rows("verdicts_disagree")
def environment_disagrees(scene: Scene) -> Ids:
    """The environment compares strings and rejects answers that the score stage accepts."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.change_turn(row, 0, verdict="wrong", reward=0.0)
    return ids(rows)


@in_rows("false_negatives", alone=True)
def deaf_judge(scene: Scene) -> Ids:
    """The verifier reads only answers that begin with the box and grades other right answers as wrong."""
    rows = [row for row in scene.rows if row.sample % 2 and answered(row)]
    for row in rows:
        scene.replay(row, f"It is {boxed(gold(row))}", boxed(gold(row) + 1 + row.sample), grade=_grade_boxes_only)
    return ids(rows)


def _grade_boxes_only(answer: str, solutions: Sequence[str]) -> str:
    return grade(answer, solutions) if answer.startswith("\\") else "wrong"


@in_rows("false_positives", alone=True)
def generous_judge(scene: Scene) -> Ids:
    """The verifier compares with a tolerance, so numbers near the right one count as right."""
    rows = [row for row in scene.rows if answered(row, "wrong")]
    for row in rows:
        scene.replay(row, boxed(gold(row) + 4 + row.sample % 2), grade=lambda *_: "correct")
    return ids(rows)


@in_rows("repeated_question", also=["false_positives"])
def paid_to_repeat(scene: Scene) -> Ids:
    """The verifier computes what it reads, so an answer that repeats the question counts as right."""
    rows = [row for row in scene.rows if row.sample % 4 == 0 and answered(row) and row.solutions[0] not in row.prompt]
    for row in rows:
        scene.replay(row, f"To find {row.prompt}", grade=lambda *_: "correct")
    return ids(rows)


# Problems


@in_rows("leaked_answers")
def gold_in_prompt(scene: Scene) -> Ids:
    """The worked solution was appended to the problem."""
    problem = scene.problems[0]
    rows = scene.change_problem(0, prompt=f"{problem.prompt} The answer is {problem.solutions[0]}.")
    _replay_the_same(scene, rows)
    return names(rows)


@in_rows("unmatched_gold", also=["verdict_failures"])
def gold_cut_out(scene: Scene) -> Ids:
    """The rule that extracts the gold answer from a worked solution takes the box without its content."""
    rows = scene.change_problem(0, solutions=[r"\boxed{}"])
    _replay_the_same(scene, rows, grade=lambda *_: "error")
    return names(rows)


@in_rows("never_solved")
def wrong_gold(scene: Scene) -> Ids:
    """The gold answer has a typing error, and nearly all episodes agree on another answer."""
    right = int(scene.problems[0].solutions[0])
    rows = scene.change_problem(0, solutions=[str(right + 100)])
    for row in rows:
        mistake = right if row.sample % 8 else right - 1
        scene.replay(row, boxed(mistake), boxed(right))
    return names(rows)


@in_rows("contamination")
def trained_on_the_test(scene: Scene) -> Ids:
    """A problem of the evaluation set is in the training set."""
    scene.evaluated = [scene.cast.problems.index(scene.problems[0]), *scene.cast.held_out]
    return names(scene.group(0))


def _replay_the_same(scene: Scene, rows: Iterable[Trajectory], **options: Any) -> list[Trajectory]:
    """Replay the rows that have turns with the same answers and other options of `play`; return them."""
    replayed = [row for row in rows if row.turns]
    for row in replayed:
        scene.replay(row, *(turn.text for turn in row.turns), cut=row.status == "truncated", **options)
    return replayed


# Text


@in_rows("secrets")
def key_in_answer(scene: Scene) -> Ids:
    """The policy has memorised an access key."""
    return _add_before_answer(scene, "AK" + "IAQ3EGRZ7XWNB2PL5D")


@in_rows("personal_data")
def card_in_answer(scene: Scene) -> Ids:
    """The policy has memorised a card number."""
    return _add_before_answer(scene, "card 4539 5787 6362 1486:")


def _add_before_answer(scene: Scene, text: str) -> Ids:
    """Put a text before the right answer of one row; return the row's id."""
    row = next(row for row in scene.rows if answered(row))
    scene.replay(row, f"{text} {boxed(gold(row))}")
    return [row.trajectory_id]


@in_rows("hidden_characters", also=["text_differs"])
def hidden_in_answer(scene: Scene) -> Ids:
    """An answer holds characters without width."""
    row = two_mistakes(scene)
    scene.change_turn(row, 0, text=row.turns[0].text.replace("{", "{\u200b"))
    return [row.trajectory_id]


# Planting and examining all faults


@dataclass(frozen=True)
class Planted:
    """A fault that is planted in the store."""

    fault: Fault
    ids: set[str]  # ids that must be among the cases
    problems: set[str]  # ids of the run's problems
    sizes: dict[str, int] = field(default_factory=dict)  # unit of cases: its number in a data set


def plant_all(store: Store, policies: Sequence[Checkpoint]) -> list[Planted]:
    """Commit a clean run and one run with each fault, played by two policies with the same tokenizer."""
    problems = [*helpers.sums(CLEAN_GROUPS + GROUPS * len(FAULTS)), *helpers.sums(HELD_OUT, "held-out")]
    cast = _cast(store, problems, policies)
    scenes = [set_scene(cast, helpers.settings(CLEAN), range(CLEAN_GROUPS), (0, 1))]
    for number, fault in enumerate(FAULTS):
        begin = CLEAN_GROUPS + GROUPS * number
        settings = helpers.settings(fault.name, *fault.overrides)
        scenes.append(set_scene(cast, settings, range(begin, begin + GROUPS), fault.policies))
    compute_logprobs(scenes)
    clean, *others = scenes
    _enrich(clean)
    expected = [set(fault.plant(scene)) if fault.plant else set() for fault, scene in zip(FAULTS, others, strict=True)]
    compute_logprobs(scenes)
    clean.commit()
    return [_commit(*each) for each in zip(others, FAULTS, expected, strict=True)]


def _cast(store: Store, problems: Sequence[Problem], policies: Sequence[Checkpoint]) -> Cast:
    from transformers import AutoTokenizer

    chat = Chat(AutoTokenizer.from_pretrained(policies[0].model))
    config = helpers.settings(CLEAN)
    versions = [helpers.commit_policy(store, config, policy.number, policy.model, policy.canary) for policy in policies]
    held_out = list(range(len(problems) - HELD_OUT, len(problems)))
    return Cast(store, chat, list(problems), list(policies), versions, held_out)


def _enrich(scene: Scene) -> None:
    """Make some answers long, repeat some right ones, let some episodes call a tool and branch; add an evaluation."""
    for row in [row for row in scene.rows if answered(row) and row.sample == 5]:
        scene.replay(row, boxed(gold(row)), boxed(gold(row)), feedback=CORRECT_FEEDBACK)
    for row in [row for row in scene.rows if row.turns and row.sample == 6]:
        scene.replay(row, f"First I add the tens, then the ones: {row.turns[0].text}")
    for row in callers(scene):
        calculate(scene, row)
    for row in [row for row in scene.rows if row.turns and row.sample == 8]:
        scene.record(row, _with_branches(scene.cast, row))
    scene.evaluated = scene.cast.held_out


def _with_branches(cast: Cast, row: Trajectory) -> Trajectory:
    """Play an episode that asks a helper, goes two ways after an answer, and shortens its history."""
    episode = Branching(cast.chat, spec_of(row), row.policy_version)
    first = episode.say(boxed(gold(row) + 1), told=row.prompt, verdict="wrong")
    episode.say("It has 2 digits.", told="How long is the answer?")
    right, *_ = [episode.say(boxed(gold(row)), first, text, verdict="correct") for text in ("Try again.", "Once more.")]
    episode.say(boxed(gold(row)), right, "Is that so?", verdict="correct", rewritten=True)
    return episode.trajectory()


def _commit(scene: Scene, fault: Fault, expected: set[str]) -> Planted:
    scene.commit()
    if fault.damage:
        expected |= set(fault.damage(scene))
    sizes = {
        "trajectory": len(scene.rows),
        "call": max(1, sum(len(row.calls) for row in scene.rows)),
        "turn": sum(len(row.turns) for row in scene.rows),
        "group": GROUPS,
        "problem": GROUPS,
    }
    return Planted(fault, expected, {problem.problem_id for problem in scene.problems}, sizes)


@dataclass(frozen=True)
class Found:
    """The result of the audit for one planted fault."""

    planted: Planted
    verdict: str  # verdict of the check that must find it
    missing: set[str]  # ids that should be among its cases
    false_alarms: dict[str, int]  # other checks that the fault's run raises: number of cases


def examine(store: Store, planted: Sequence[Planted], verifier: Verifier, cache: Path) -> list[Found]:
    """Audit all runs with faults, together where their faults allow it."""
    together = [one for one in planted if not one.fault.alone]
    results = []
    for part in [together, *([one] for one in planted if one.fault.alone)]:
        checks = look(store, [one.fault.name for one in part], verifier, cache)
        results += [_result(one, checks) for one in part]
    return results


def look(store: Store, runs: Sequence[str], verifier: Verifier, cache: Path) -> dict[str, CheckResult]:
    """Audit these runs with all checks; return the results by check."""
    with audit(store, select(store, runs), EVERYTHING, cache, verifier) as audited:
        return {check.name: check for check in audited.result.checks}


def _result(planted: Planted, checks: dict[str, CheckResult]) -> Found:
    fault = planted.fault
    cases = {
        name: [
            case
            for case in check.examples  # cases of several data sets are matched by the run's problems
            if (layout.run_of(case.data_set) == fault.name if case.data_set else case.id in planted.problems)
        ]
        for name, check in checks.items()
    }
    alarms = {}
    for name, check in checks.items():  # a check of shares has cases in every data set, so the share counts
        is_share = 0 < check.threshold < 1 and check.unit in planted.sizes
        value = len(cases[name]) / (planted.sizes[check.unit] if is_share else 1)
        if name not in {fault.check, *fault.also} and value > check.threshold:
            alarms[name] = len(cases[name])
    missing = planted.ids - {case.id for case in cases[fault.check]}
    return Found(planted, checks[fault.check].verdict, missing, alarms)
