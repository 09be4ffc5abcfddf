r"""What goes wrong with trajectories in practice, planted one by one into runs that are otherwise clean.

python -m tests.support.planted_faults      builds them, audits them, and prints what was found

Each fault has a run of its own, of its name. A function changes the rows of one before they are committed
(`@in_rows`), or damages the store after that (`@in_store`); it returns the ids that must be among the cases of the
check that finds it. Its docstring says what happened.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa

from configs.audit import Audit, Checks
from storage import layout
from storage.objects.store import Store
from storage.records import Problem, Trajectory
from storage.versions.checkpoints import Checkpoint
from tasks.agents.math_multi_turn import CORRECT_FEEDBACK
from tests.support import audit_helpers as made
from tests.support.audit_helpers import Language, Weights
from tests.support.audit_scene import Cast, Committed, Scene, judge, set_scene
from tests.support.chain_helpers import SHARD, key, rewrite, rewrite_shard

if TYPE_CHECKING:
    from tasks.audit.results import Case, CheckResult
    from tasks.score.verifier import Verifier

GROUPS = 12  # of a run with a fault
EVERYTHING = Audit(examples=1_000_000, recomputed=1000)  # all rows of up to three data sets
WIDTH = 200  # of the table where the output is no terminal
CLEAN, CLEAN_GROUPS = "clean", 24
HELD_OUT = 50  # problems

Ids = Iterable[str]
Plant = Callable[[Scene], Ids]
Damage = Callable[[Store, Committed], Ids]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    name: str  # of its run
    check: str  # that must find it
    happens: str
    plant: Plant | None = None
    damage: Damage | None = None
    policies: Sequence[int] = (0,)  # version that plays, by iteration
    overrides: Sequence[str] = ()  # of the run's configuration
    also: frozenset[str] = frozenset()  # checks that see a consequence of it
    alone: bool = False  # its run is audited alone: the check looks at few data sets, or at one share of all


FAULTS: list[Fault] = []


def in_rows(
    check: str,
    policies: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    also: Sequence[str] = (),
    alone: bool = False,
) -> Callable[[Plant], Plant]:
    """A fault in what was stored; the decorated function changes it."""

    def register(plant: Plant) -> Plant:
        happens = plant.__doc__ or ""
        FAULTS.append(Fault(_name(plant), check, happens, plant, None, policies, overrides, frozenset(also), alone))
        return plant

    return register


def in_store(check: str, also: Sequence[str] = ()) -> Callable[[Damage], Damage]:
    """A fault of the store; the decorated function damages it."""

    def register(damage: Damage) -> Damage:
        FAULTS.append(Fault(_name(damage), check, damage.__doc__ or "", damage=damage, also=frozenset(also)))
        return damage

    return register


def _name(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", "-")


def ids(rows: Iterable[Trajectory]) -> list[str]:
    return [row.trajectory_id for row in rows]


def names(rows: Iterable[Trajectory]) -> set[str]:
    return {row.problem_id for row in rows}


def gold(row: Trajectory) -> int:
    return int(row.solutions[0])


def boxed(number: object) -> str:
    return rf"\boxed{{{number}}}"


def two_mistakes(scene: Scene, number: int = 0) -> Trajectory:
    """A row of two turns, both wrong."""
    rows = [row for row in scene.sets[number].rows if [turn.verdict for turn in row.turns] == ["wrong", "wrong"]]
    return rows[0]


def answered(row: Trajectory, verdict: str = "correct") -> bool:
    """Whether the first turn has that verdict."""
    return bool(row.turns) and row.turns[0].verdict == verdict


# Integrity


@in_store("damaged_objects")
def flipped_byte(store: Store, committed: Committed) -> Ids:
    """A disk returned one wrong byte of a shard."""
    path = key(store, committed.trajectories[0], SHARD)
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))
    return [path]


@in_store("damaged_objects")
def lost_shard(store: Store, committed: Committed) -> Ids:
    """A clean-up by hand deleted a shard."""
    path = key(store, committed.trajectories[0], "part-00001.parquet")
    store.delete(path)
    return [path]


@in_store("damaged_objects", also=["unscored_turns"])
def lost_scores(store: Store, committed: Committed) -> Ids:
    """The scores' only shard was cut in half by a full disk."""
    path = key(store, committed.scores[0], SHARD)
    store.write(path, store.read(path)[:1000])
    return [path]


@in_store("damaged_objects")
def cut_manifest(store: Store, committed: Committed) -> Ids:
    """A manifest was cut while somebody copied the store."""
    path = layout.manifest(committed.trajectories[0])
    store.write(path, store.read(path)[:500])
    return [path]


@in_store("wrong_schema", also=["broken_parents"])
def newer_schema(store: Store, committed: Committed) -> Ids:
    """A newer version of this package wrote the rows."""
    rewrite_shard(
        store,
        committed.trajectories[0],
        lambda rows: rows.replace_schema_metadata({"kind": "trajectories", "schema_version": "99"}),
    )
    return [key(store, committed.trajectories[0], SHARD)]


@in_store("wrong_schema", also=["broken_parents"])
def wider_numbers(store: Store, committed: Committed) -> Ids:
    """Another tool rewrote a shard, and its logprobs came back as doubles."""

    def widened(rows: pa.Table) -> pa.Table:
        index = rows.column_names.index("logprobs")
        wide = pa.field("logprobs", pa.list_(pa.float64()), nullable=False)
        return rows.set_column(index, wide, rows["logprobs"].cast(wide.type))

    rewrite_shard(store, committed.trajectories[0], widened)
    return [key(store, committed.trajectories[0], SHARD)]


@in_store("broken_parents")
def changed_parent(store: Store, committed: Committed) -> Ids:
    """The problem set's manifest was written again after the rollout."""
    rewrite(store, committed.problem_set, lambda values: values.update(metrics={"problems": 1}))
    return [layout.manifest(committed.problem_set)]


@in_store("broken_parents")
def lost_parent(store: Store, committed: Committed) -> Ids:
    """The problem set was deleted."""
    store.delete(layout.manifest(committed.problem_set))
    return [layout.manifest(committed.problem_set)]


@in_rows("broken_parents")
def strange_policy(scene: Scene) -> Ids:
    """Rows of another policy's rollout were appended to a shard."""
    rows = [scene.change(row, policy=layout.checkpoint("elsewhere", 0)) for row in scene.group(0)]
    return ids(rows)


@in_rows("duplicate_ids", also=["repeated_seeds"])
def rows_written_twice(scene: Scene) -> Ids:
    """A retried upload wrote the last rows of a shard once more."""
    again = scene.group(0)[:4]
    scene.rows.extend(again)
    return ids(again)


@in_rows("unscored_turns")
def second_turns_unscored(scene: Scene) -> Ids:
    """The score stage of an older version judged the first turn only."""
    scene.sets[0].scores = [score for score in scene.scores if score.turn == 0]
    return ids(row for row in scene.rows if len(row.turns) > 1)


@in_rows("unscored_turns")
def never_scored(scene: Scene) -> Ids:
    """The run ended between rollout and scores."""
    scene.sets[0].scores = None
    return ids(row for row in scene.rows if row.turns)


@in_rows("orphan_scores")
def rows_filtered_later(scene: Scene) -> Ids:
    """Somebody threw out a group after it was scored."""
    rows = scene.group(0)
    for row in rows:
        scene.rows.remove(row)
    return ids(row for row in rows if row.turns)


@in_rows("orphan_scores")
def scored_twice(scene: Scene) -> Ids:
    """Two attempts at scoring wrote into one version."""
    again = scene.scores[:5]
    scene.scores.extend(again)
    return {score.trajectory_id for score in again}


# Tokens


@in_rows("mask_and_spans")
def shifted_mask(scene: Scene) -> Ids:
    """The mask was made for the targets, one token later than the inputs."""
    row = two_mistakes(scene)
    scene.change(row, action_mask=[False, *row.action_mask[:-1]])
    return [row.trajectory_id]


@in_rows("mask_and_spans")
def feedback_in_mask(scene: Scene) -> Ids:
    """Feedback is masked as if the policy had said it."""
    row = two_mistakes(scene)
    begin = row.turns[0].start
    scene.change(row, action_mask=[place >= begin for place in range(len(row.token_ids))])
    return [row.trajectory_id]


@in_rows("mask_and_spans")
def short_column(scene: Scene) -> Ids:
    """The engine returned no version for the last token."""
    row = two_mistakes(scene)
    scene.change(row, versions=row.versions[:-1])
    return [row.trajectory_id]


@in_rows("broken_prefix")
def turns_out_of_order(scene: Scene) -> Ids:
    """Answers of one episode came back in another order than they were asked for."""
    row = two_mistakes(scene)
    scene.change(row, turns=row.turns[::-1])
    return [row.trajectory_id]


@in_rows("broken_prefix", also=["mask_and_spans", "bad_logprobs", "falling_versions", "text_differs"])
def overlapping_turns(scene: Scene) -> Ids:
    """Spans were counted from the prompt's length without its first token."""
    row = two_mistakes(scene)
    scene.change_turn(row, 1, start=row.turns[0].end - 1)
    return [row.trajectory_id]


@in_rows("broken_prefix", also=["template_drift"])
def prompt_of_another(scene: Scene) -> Ids:
    """Two requests were exchanged: an episode answers the prompt of another problem."""
    row = two_mistakes(scene)
    other = next(each for each in scene.rows if each.problem_id != row.problem_id)
    scene.retell(row, *(turn.text for turn in row.turns), prompt=other.prompt)
    return [row.trajectory_id]


@in_rows("bad_logprobs")
def nan_logprob(scene: Scene) -> Ids:
    """The sampler divided 0 by 0."""
    return [_with_logprob(scene, math.nan)]


@in_rows("bad_logprobs")
def infinite_logprob(scene: Scene) -> Ids:
    """A token was forced that the policy gave no chance."""
    return [_with_logprob(scene, -math.inf)]


@in_rows("bad_logprobs")
def positive_logprob(scene: Scene) -> Ids:
    """A logit was stored in place of a logprob."""
    return [_with_logprob(scene, 3.5)]


@in_rows("bad_logprobs")
def prompt_logprobs(scene: Scene) -> Ids:
    """The server's prompt logprobs were stored, too."""
    return [_with_logprob(scene, -2.0, -1)]


def _with_logprob(scene: Scene, value: float, offset: int = 0) -> str:
    """In a row of two turns, where the first begins or beside it."""
    row = two_mistakes(scene)
    place = row.turns[0].start + offset
    scene.change(row, logprobs=[*row.logprobs[:place], value, *row.logprobs[place + 1 :]])
    return row.trajectory_id


@in_rows("falling_versions", policies=(0, 1), overrides=["rollout.max_head_offpolicyness=1"])
def version_falls(scene: Scene) -> Ids:
    """A request was moved to a replica that still had the old weights, in the middle of a turn."""
    row = two_mistakes(scene, 1)
    end = row.turns[0].end
    scene.change(row, versions=[*row.versions[: end - 2], 0, 0, *row.versions[end:]])
    return [row.trajectory_id]


@in_rows("falling_versions")
def version_of_the_future(scene: Scene) -> Ids:
    """The server counts its weights otherwise than the run."""
    row = two_mistakes(scene)
    scene.change(row, versions=[7 if version >= 0 else version for version in row.versions])
    return [row.trajectory_id]


@in_rows("falling_versions")
def version_unknown(scene: Scene) -> Ids:
    """The server did not say which weights it had."""
    row = two_mistakes(scene)
    scene.change(row, versions=[-1] * len(row.versions))
    return [row.trajectory_id]


@in_rows("text_differs")
def tidied_text(scene: Scene) -> Ids:
    """Answers were stored as a post-processor left them, not as they were sampled."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.change_turn(row, 0, text=f"The answer is {boxed(gold(row))}")
    return ids(rows)


@in_rows("text_differs")
def tokens_of_another_tokenizer(scene: Scene) -> Ids:
    """The special tokens were added to a vocabulary, and all ids moved by one."""
    row = two_mistakes(scene)
    begin, end = row.turns[0].start, row.turns[0].end
    moved = [token + 1 for token in row.token_ids[begin : end - 1]]
    changed = scene.change(row, token_ids=[*row.token_ids[:begin], *moved, *row.token_ids[end - 1 :]])
    scene.change(changed, logprobs=scene.logprobs([changed], 0)[0])
    return [row.trajectory_id]


@in_rows("template_drift", policies=(0, 1))
def system_prompt_added(scene: Scene) -> Ids:
    """Somebody gave the agent a system prompt, and the run went on."""
    rows = [row for row in scene.sets[1].rows if row.turns]
    for row in rows:
        scene.retell(row, *(turn.text for turn in row.turns), system="Think.", cut=row.status == "truncated")
    return ids(rows)


# Policy


@in_rows("logprob_drift", alone=True)
def other_weights(scene: Scene) -> Ids:
    """The server kept serving other weights than it was given."""
    return _replace_logprobs(scene, scene.logprobs(scene.rows, 1))


@in_rows("logprob_drift", alone=True)
def other_temperature(scene: Scene) -> Ids:
    """The server reports logprobs of another temperature than it sampled with."""
    return _replace_logprobs(scene, scene.logprobs(scene.rows, 0, temperature=0.7))


def _replace_logprobs(scene: Scene, logprobs: Sequence[list[float]]) -> Ids:
    """Those that differ by more than the check allows, as a mean over their tokens."""
    found = []
    for row, others in zip(list(scene.rows), logprobs, strict=True):
        scene.change(row, logprobs=others)
        nats = sum(abs(one - other) for one, other in zip(row.logprobs, others, strict=True))
        if nats > 1.01 * Checks().logprob_drift.threshold * sum(row.action_mask):
            found.append(row.trajectory_id)
    return found


@in_rows("staleness", policies=(0, 0))
def old_policy(scene: Scene) -> Ids:
    """The new weights never reached the server: an iteration was played by the policy of the one before."""
    return ids(row for row in scene.sets[1].rows if row.turns)


# Learning


@in_rows("success_drift", policies=(0, 1))
def collapse(scene: Scene) -> Ids:
    """After an update that was too large nearly all answers are wrong."""
    for row in [row for row in scene.sets[1].rows if row.sample > 1 and answered(row)]:
        scene.retell(row, boxed(gold(row) + row.sample), boxed(gold(row) - row.sample))
    return [layout.trajectories(scene.name, 1)]


@in_rows("broken_answers")
def talked_out_of_it(scene: Scene) -> Ids:
    """The agent goes on after a right answer, and the policy changes its mind."""
    rows = [row for row in scene.rows if answered(row)]
    for number, row in enumerate(rows):
        scene.retell(row, boxed(gold(row)), boxed(gold(row) + number % 2), told=CORRECT_FEEDBACK)
    return ids(rows[1::2])


@in_rows("zero_variance")
def too_easy(scene: Scene) -> Ids:
    """The problems are solved by every episode."""
    for row in list(scene.rows):
        scene.retell(row, boxed(gold(row)))
    return names(scene.rows)


@in_rows("zero_variance")
def too_hard(scene: Scene) -> Ids:
    """The problems are solved by no episode, each time with another mistake."""
    for row in list(scene.rows):
        scene.retell(row, boxed(gold(row) + 1 + row.sample), boxed(gold(row) - 1 - row.sample))
    return names(scene.rows)


@in_rows("identical_answers")
def one_answer_copied(scene: Scene) -> Ids:
    """The engine answered all requests of a group from one sample."""
    rows = [row for group in range(4) for row in scene.group(group)]
    for row in rows:
        scene.retell(row, f"First I add the tens, then the ones: {boxed(gold(row))}")
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
    """Whatever is long is right: the policy will learn to be long."""
    for row in [row for row in scene.rows if answered(row)]:
        scene.retell(row, f"I add up the tens and the ones of both: {boxed(gold(row))}")
    return [layout.trajectories(scene.name, 0)]


@in_rows("length_and_reward")
def shorter_is_right(scene: Scene) -> Ids:
    """Whoever thinks is wrong: the policy will learn not to."""
    for row in [row for row in scene.rows if answered(row, "wrong")]:
        working = f"I add up the tens and the ones of both: {row.turns[0].text}"
        scene.retell(row, working, *(turn.text for turn in row.turns[1:]))
    return [layout.trajectories(scene.name, 0)]


# Episodes


@in_rows("truncated")
def limit_too_low(scene: Scene) -> Ids:
    """`sampling.max_new_tokens` cuts a good part of the episodes."""
    rows = [row for row in scene.rows if row.sample % 3 == 0 and answered(row)]
    for row in rows:
        scene.retell(row, f"{boxed(gold(row))} so", cut=True)
    return ids(row for row in scene.rows if row.status == "truncated")


@in_rows("failed")
def deadlines(scene: Scene) -> Ids:
    """A replica hung, and its episodes came over their deadline."""
    rows = [row for row in scene.rows if row.sample % 8 == 0]
    nothing: dict[str, list[object]] = {"token_ids": [], "action_mask": [], "logprobs": [], "versions": [], "turns": []}
    for row in rows:
        scene.unscore(row)
        scene.change(row, status="failed", reason="deadline of 600 s", **nothing)
    return ids(rows)


@in_rows("loops")
def endless_sums(scene: Scene) -> Ids:
    """The policy found no end."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.retell(row, "1 + 1 = 2, " * 8 + boxed(gold(row)))
    return ids(rows)


@in_rows("unparsable", also=["length_and_reward"])
def no_answer(scene: Scene) -> Ids:
    """The policy has forgotten the format."""
    rows = [row for row in scene.rows if answered(row, "wrong")]
    for row in rows:
        scene.retell(row, "I am not sure about it.", "It is hard to say.")
    return ids(rows)


@in_rows("verdict_failures")
def slow_judge(scene: Scene) -> Ids:
    """The judge's machine was overloaded: it took too long to compare."""
    rows = [row for row in scene.rows if row.sample % 4 == 0 and answered(row, "wrong")]
    for row in rows:
        scene.rescore(row, 0, verdict="timeout", extracted="", reason="took longer than 5 s")
    return ids(rows)


# Verdicts


@in_rows("verdicts_disagree")
def environment_disagrees(scene: Scene) -> Ids:
    """The environment compares strings: it called wrong what the score stage calls right."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.change_turn(row, 0, verdict="wrong", reward=0.0)
    return ids(rows)


@in_rows("verdicts_disagree")
def judged_both_ways(scene: Scene) -> Ids:
    """A judge with state: the same answer to the same problem is right in one row and wrong in another."""
    rows = [row for row in scene.group(0) if answered(row)]
    scene.change_turn(rows[0], 0, verdict="wrong", reward=0.0)
    scene.rescore(rows[0], 0, verdict="wrong", success=0.0)
    return ids(rows[:1])


@in_rows("false_negatives", alone=True)
def deaf_judge(scene: Scene) -> Ids:
    """A rule of the judge reads only what begins with the box: every other right answer is called wrong."""
    rows = [row for row in scene.rows if row.sample % 2 and answered(row)]
    for row in rows:
        scene.retell(row, f"It is {boxed(gold(row))}", boxed(gold(row) + 1 + row.sample), judge=_deaf)
    return ids(rows)


def _deaf(answer: str, solutions: Sequence[str]) -> str:
    return judge(answer, solutions) if answer.startswith("\\") else "wrong"


@in_rows("false_positives", alone=True)
def generous_judge(scene: Scene) -> Ids:
    """The judge compares with a tolerance: numbers next to the right one are right."""
    rows = [row for row in scene.rows if answered(row, "wrong")]
    for row in rows:
        scene.retell(row, boxed(gold(row) + 4 + row.sample % 2), judge=lambda *_: "correct")
    return ids(rows)


# Problems


@in_rows("leaked_answers")
def gold_in_prompt(scene: Scene) -> Ids:
    """The worked solution was appended to the problem."""
    problem = scene.problems[0]
    rows = scene.change_problem(0, prompt=f"{problem.prompt} The answer is {problem.solutions[0]}.")
    _ask_anew(scene, rows)
    return names(rows)


@in_rows("leaked_answers")
def feedback_tells(scene: Scene) -> Ids:
    """The feedback names the right answer."""
    rows = [row for row in scene.group(0) if len(row.turns) > 1]
    for row in rows:
        scene.retell(row, *(turn.text for turn in row.turns), told=f"No. The right answer is {gold(row)}.")
    return ids(rows)


@in_rows("unmatched_gold", also=["verdict_failures"])
def empty_gold(scene: Scene) -> Ids:
    """A column was empty when the problems were imported."""
    return _ask_for(scene, "")


@in_rows("unmatched_gold", also=["verdict_failures"])
def gold_cut_out(scene: Scene) -> Ids:
    """The rule that finds the gold in a worked solution takes the box and leaves what is in it."""
    return _ask_for(scene, r"\boxed{}")


def _ask_for(scene: Scene, gold: str) -> Ids:
    """The first problem with a gold that the judge cannot read."""
    rows = scene.change_problem(0, solutions=[gold])
    for row in [row for row in rows if row.turns]:
        scene.retell(row, *(turn.text for turn in row.turns), judge=lambda *_: "error")
    return names(rows)


@in_rows("never_solved")
def wrong_gold(scene: Scene) -> Ids:
    """A typing error in the gold answer: nearly all episodes agree on another one."""
    right = int(scene.problems[0].solutions[0])
    rows = scene.change_problem(0, solutions=[str(right + 100)])
    for row in rows:
        mistake = right if row.sample % 8 else right - 1
        scene.retell(row, boxed(mistake), boxed(right))
    return names(rows)


@in_rows("unmatched_gold", also=["never_solved"])
def gold_not_there(scene: Scene) -> Ids:
    """Where a problem has no gold answer its column says so in words, which no number matches."""
    right = int(scene.problems[0].solutions[0])
    rows = scene.change_problem(0, solutions=["N/A"])
    for row in rows:
        scene.retell(row, boxed(right if row.sample % 4 else right + 1), boxed(right))
    return names(rows)


@in_rows("contamination")
def trained_on_the_test(scene: Scene) -> Ids:
    """A problem of the evaluation set is among those of the training."""
    scene.evaluated = [scene.cast.language.problems.index(scene.problems[0]), *scene.cast.held_out]
    return names(scene.group(0))


def _ask_anew(scene: Scene, rows: Iterable[Trajectory]) -> None:
    """The same answers to what is now the prompt."""
    for row in [row for row in rows if row.turns]:
        scene.retell(row, *(turn.text for turn in row.turns), cut=row.status == "truncated")


# Text


@in_rows("secrets")
def key_in_answer(scene: Scene) -> Ids:
    """The policy has learned an access key by heart."""
    return _say(scene, "AK" + "IAQ3EGRZ7XWNB2PL5D")


@in_rows("secrets")
def key_in_prompt(scene: Scene) -> Ids:
    """A private key was pasted into a problem."""
    secret = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEpAIBAAKCAQEA7bq8dQ0p\n"
    rows = scene.change_problem(0, prompt=secret + scene.problems[0].prompt)
    _ask_anew(scene, rows)
    return names(rows)


@in_rows("personal_data")
def address_in_answer(scene: Scene) -> Ids:
    """The policy writes to people."""
    rows = [row for row in scene.group(0) if answered(row)]
    for row in rows:
        scene.retell(row, f"ask jane.miller{row.sample}@mailbox.org: {boxed(gold(row))}")
    return ids(rows)


@in_rows("personal_data")
def card_in_answer(scene: Scene) -> Ids:
    """The policy knows somebody's card."""
    return _say(scene, "card 4539 5787 6362 1486:")


def _say(scene: Scene, text: str) -> Ids:
    """Before the right answer of one row."""
    row = next(row for row in scene.rows if answered(row))
    scene.retell(row, f"{text} {boxed(gold(row))}")
    return [row.trajectory_id]


@in_rows("hidden_characters")
def reordered_prompt(scene: Scene) -> Ids:
    """A problem holds a control character that reorders what people see of it."""
    problem = scene.problems[0]
    rows = scene.change_problem(0, prompt=problem.prompt.replace("?", "\u202e?"))
    _ask_anew(scene, rows)
    return names(rows)


@in_rows("hidden_characters", also=["text_differs"])
def hidden_in_answer(scene: Scene) -> Ids:
    """An answer holds characters without width."""
    row = two_mistakes(scene)
    scene.change_turn(row, 0, text=row.turns[0].text.replace("{", "{\u200b"))
    return [row.trajectory_id]


# All of them


@dataclass(frozen=True)
class Planted:
    """A fault in the store."""

    fault: Fault
    ids: set[str]  # must be among the cases
    committed: Committed
    problems: set[str]  # ids
    sizes: dict[str, int] = field(default_factory=dict)  # by unit of cases: how many there are in a data set


def plant_all(store: Store, policies: Sequence[Checkpoint]) -> list[Planted]:
    """A clean run and one with each fault, of two policies with the same tokenizer."""
    problems = [*made.sums(99, CLEAN_GROUPS + GROUPS * len(FAULTS)), *made.sums(99, HELD_OUT, "held-out")]
    cast = _cast(store, problems, policies)
    _clean(cast).commit()
    planted = []
    for number, fault in enumerate(FAULTS):
        begin = CLEAN_GROUPS + GROUPS * number
        scene = set_scene(
            cast, made.settings(fault.name, *fault.overrides), range(begin, begin + GROUPS), fault.policies
        )
        planted.append(_plant(store, scene, fault))
    return planted


def _cast(store: Store, problems: Sequence[Problem], policies: Sequence[Checkpoint]) -> Cast:
    from transformers import AutoTokenizer

    language = Language(AutoTokenizer.from_pretrained(policies[0].model), problems)
    config = made.settings(CLEAN)
    versions = [made.commit_policy(store, config, policy.number, policy.model, policy.canary) for policy in policies]
    held_out = list(range(len(problems) - HELD_OUT, len(problems)))
    return Cast(store, language, list(policies), versions, [Weights(policy.model) for policy in policies], held_out)


def _clean(cast: Cast) -> Scene:
    """Two iterations and an evaluation; some answers are long, and some right ones are given once more."""
    scene = set_scene(cast, made.settings(CLEAN), range(CLEAN_GROUPS), (0, 1))
    for row in [row for row in scene.rows if answered(row) and row.sample == 5]:
        scene.retell(row, boxed(gold(row)), boxed(gold(row)), told=CORRECT_FEEDBACK)
    for row in [row for row in scene.rows if row.turns and row.sample == 6]:
        scene.retell(row, f"First I add the tens, then the ones: {row.turns[0].text}")
    scene.settle()
    scene.evaluated = cast.held_out
    return scene


def _plant(store: Store, scene: Scene, fault: Fault) -> Planted:
    found = set(fault.plant(scene)) if fault.plant else set[str]()
    scene.settle()
    committed = scene.commit()
    if fault.damage:
        found |= set(fault.damage(store, committed))
    sizes = {
        "trajectory": len(scene.rows),
        "turn": sum(len(row.turns) for row in scene.rows),
        "group": GROUPS,
        "problem": GROUPS,
    }
    return Planted(fault, found, committed, {problem.problem_id for problem in scene.problems}, sizes)


@dataclass(frozen=True)
class Found:
    """What the audit says about one planted fault."""

    planted: Planted
    verdict: str  # of the check that must find it
    cases: int  # of that check in the fault's run
    missing: set[str]  # ids that should be among them
    false_alarms: dict[str, int]  # by other check that is raised by the fault's run: cases


def examine(store: Store, planted: Sequence[Planted], verifier: "Verifier", cache: Path) -> list[Found]:
    """Audit all runs with faults, as many at once as can be."""
    together = [each for each in planted if not each.fault.alone]
    parts = [together, *([each] for each in planted if each.fault.alone)]
    found = []
    for part in parts:
        checks = look(store, [each.fault.name for each in part], verifier, cache)
        found += [_found(each, checks) for each in part]
    return found


def look(store: Store, runs: Sequence[str], verifier: "Verifier", cache: Path) -> "dict[str, CheckResult]":
    """What all checks say about these runs."""
    from tasks.audit.run import audit
    from tasks.audit.selection import select

    with audit(store, select(store, runs), EVERYTHING, cache, verifier) as audited:
        return {check.name: check for check in audited.result.checks}


def _found(planted: Planted, checks: "dict[str, CheckResult]") -> Found:
    fault = planted.fault
    mine = {name: [case for case in check.examples if _is_of(case, planted)] for name, check in checks.items()}
    others = {name: cases for name, cases in mine.items() if name not in {fault.check, *fault.also}}
    alarms = {name: len(cases) for name, cases in others.items() if _is_alarm(checks[name], cases, planted.sizes)}
    missing = planted.ids - {case.id for case in mine[fault.check]}
    return Found(planted, checks[fault.check].verdict, len(mine[fault.check]), missing, alarms)


def _is_of(case: "Case", planted: Planted) -> bool:
    """Each run has problems of its own, which cases about no single data set name."""
    return layout.run_of(case.data_set) == planted.fault.name if case.data_set else case.id in planted.problems


def _is_alarm(check: "CheckResult", cases: "list[Case]", sizes: dict[str, int]) -> bool:
    """A check of shares notes cases in every data set; they are an alarm where their share is too large."""
    share = len(cases) / sizes[check.unit] if 0 < check.threshold < 1 and check.unit in sizes else len(cases)
    return share > check.threshold


def show(found: Sequence[Found]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("planted", "what happened", "check", "says", "cases", "of planted", "false alarms", show_lines=True)
    for each in sorted(found, key=lambda each: list(Checks.model_fields).index(each.planted.fault.check)):
        fault, planted = each.planted.fault, len(each.planted.ids)
        alarms = ", ".join(f"{name} {cases}" for name, cases in each.false_alarms.items())
        hits = f"{planted - len(each.missing)} of {planted}"
        table.add_row(fault.name, fault.happens, fault.check, each.verdict, f"{each.cases}", hits, alarms)
    Console(width=max(Console().width, WIDTH)).print(table)
    whole = sum(each.verdict in ("warn", "fail") and not each.missing for each in found)
    false = sum(len(each.false_alarms) for each in found)
    print(f"{whole} of {len(found)} faults found with all their cases; {false} false alarms")


def main() -> None:
    """Plant, audit and print, with policies taught for a moment."""
    from tasks.agents.math_multi_turn import WRONG_FEEDBACK
    from tasks.score.verifier import Verifier
    from tasks.warm_start.teach import make_policy
    from tests import conftest

    with TemporaryDirectory() as scratch, Verifier() as verifier:
        folder, store = Path(scratch), Store(f"{scratch}/store")
        make_policy(conftest.TINY, conftest.SOURCE, WRONG_FEEDBACK, seed=1, folder=folder / "policy")
        policies = [conftest.commit_policy(store, version, folder / "policy", 0.02 * version) for version in range(2)]
        show(examine(store, plant_all(store, policies), verifier, folder / "cache"))


if __name__ == "__main__":
    main()
