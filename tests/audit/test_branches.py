"""Episodes with branches, rewritten histories and several conversations, in the tables, checks and numbers."""

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from storage.records import Call, Trajectory
from storage.versions.contents import _NEW
from tasks.audit.database import read_conversations
from tasks.audit.run import set_numbers
from tests.support.audit_play import FEEDBACK, SUM, Audited, Play, scored
from tests.support.audit_scene import say
from tests.support.branching import begin, with_branches
from tests.support.chain_helpers import TRAJECTORIES, rewrite_shard

CHECKS = [
    *("mask_and_spans", "broken_prefix", "falling_versions", "bad_logprobs", "text_differs", "template_drift"),
    *("loops", "identical_answers", "leaked_answers", "repeated_seeds", "broken_answers"),
]
"""Checks that an episode with branches must pass."""


def branching(play: Play, name: str, sample: int = 0) -> Trajectory:
    return with_branches(begin(play.chat, name, SUM, sample), 19)


def test_episodes_with_branches_pass(audited: Audited, play: Play) -> None:
    """What an agent may do is no fault, beside episodes of the same group without branches."""
    rows = [branching(play, f"b{number}", number) for number in range(2)]
    seeds = [[turn.seed for turn in row.turns] for row in rows]
    assert not set(seeds[0]) & set(seeds[1])
    rows += [play(f"{number}", r"\boxed{18}", rf"\boxed{{{number}}}") for number in range(40, 43)]
    audited.add(rows[:2] + [say(row, 0, seed=number) for number, row in enumerate(rows[2:], 900)])
    for check in CHECKS:
        measured, found = audited.run(check)
        assert (measured.value, found) == (0, []), check


def test_their_tables_and_numbers(audited: Audited, play: Play) -> None:
    """Each answer is compared with the one that it follows, past turns that answer nothing; never across branches."""
    row = branching(play, "a")
    assert (row.follows, row.ungraded) == ([-1, -1, 1, 1, 2], [0])
    audited.add([row], *scored(row, *(("none" if turn in row.ungraded else "wrong") for turn in range(5))))
    with audited.evidence() as evidence:
        database = evidence.database
        assert database.all("select follows from turns order by turn") == [(turn,) for turn in row.follows]
        assert database.all("select turns, calls, branches from episodes") == [(5, 0, 2)]
        pairs = {(before, turn) for turn, before in enumerate(row.follows) if before >= 0}
        assert set(database.all("select before, turn from revisions")) == pairs
        (numbers,) = set_numbers(database, {})
        assert (numbers.branched, numbers.with_calls, numbers.fixed) == (1.0, None, 0.0)
        (conversation,) = read_conversations(database, [0])
        assert [turn["graded"] for turn in conversation["turns"]] == [turn not in row.ungraded for turn in range(5)]


def test_right_then_wrong_is_a_matter_of_one_conversation(audited: Audited, play: Play) -> None:
    """A wrong answer in another branch is no answer given up; one after a call of a tool is."""
    rows = []
    for name, linear in (("apart", False), ("after", True)):
        episode = begin(play.chat, name, SUM)
        first = episode.say("thinking", told=SUM.prompt)
        right = episode.say(r"\boxed{19}", first, FEEDBACK, verdict="correct")
        asked = episode.say("call", right if linear else first, FEEDBACK)
        episode.say(r"\boxed{18}", asked, FEEDBACK, verdict="wrong")
        rows.append(episode.trajectory())
    verdicts = {"correct": "correct", "wrong": "wrong", "": "none"}
    scores = [score for row in rows for score in scored(row, *(verdicts[turn.verdict] for turn in row.turns))]  # type: ignore[arg-type]
    audited.add(rows, *scores)
    measured, found = audited.run("broken_answers")
    assert measured.value == 1
    assert found == [("after", "turn 2 was right, turn 4 is not")]


FAULTS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "itself": lambda row: replace(row, follows=[*row.follows[:-1], len(row.turns) - 1]),
    "nowhere": lambda row: replace(row, follows=[*row.follows[:-1], 7]),
    "call": lambda row: replace(row, calls=[Call(9, "c", "tool", "{}", "", "unanswered")]),
    "order": lambda row: replace(row, sequence_starts=[0]),
}


def test_wrong_branches_are_found(audited: Audited, play: Play) -> None:
    """Rows that name turns which they lack, or contradict the order of their tokens, are named."""
    rows = [replace(branching(play, "right"), problem_id="right")]
    rows += [replace(spoil(branching(play, name)), problem_id=name) for name, spoil in FAULTS.items()]
    audited.add(rows)
    found = dict[str, str](audited.run("broken_prefix")[1])
    assert sorted(found) == sorted(FAULTS)
    assert found["call"] == "it has a call in turn 10, which does not exist"


def test_another_prompt_is_found_among_branches(audited: Audited, play: Play) -> None:
    """The prompt of a group is that of any of an episode's conversations, wherever it stands in the row."""
    odd = begin(play.chat, "odd", SUM, 9)
    first = odd.say("18", told="What is 1 + 1?", verdict="wrong")
    odd.say("18", first, FEEDBACK, verdict="wrong")
    audited.add([*(branching(play, f"{number}", number) for number in range(3)), odd.trajectory()])
    assert [name for name, _ in audited.run("broken_prefix")[1]] == ["odd"]


def test_feedback_that_no_branch_was_given_is_found(audited: Audited, play: Play) -> None:
    """A turn with branches has the feedback of one of them; with none of theirs it is a case."""
    episode = begin(play.chat, "a", SUM)
    first = episode.say("18", told=SUM.prompt, verdict="wrong")
    for number in range(2):
        episode.say("19", first, f"No {number}.", verdict="correct")
    # Of rows with several sequences a sixteenth is looked at, so that there must be many of them.
    rows = [replace(episode.trajectory(), trajectory_id=f"{number}") for number in range(100)]
    told = [say(row, 0, feedback=told) for row in rows for told in ("No 0.", "What?")]
    audited.add([replace(row, trajectory_id=f"{row.turns[0].feedback} {row.trajectory_id}") for row in told])
    found = [name for name, _ in audited.run("template_drift")[1]]
    assert found
    assert all(name.startswith("What?") for name in found)


def as_first_schema(rows: pa.Table) -> pa.Table:
    older = rows.drop_columns([name for name in rows.column_names if name in _NEW["trajectories"]])
    return older.replace_schema_metadata({**(older.schema.metadata or {}), b"schema_version": b"1"})


def test_files_of_all_schemas_are_read_together(audited: Audited, play: Play) -> None:
    """Rows without the newer columns have no calls and no branches; all checks run over the mixture."""
    rows = [play(f"{number}", "18", "19") for number in range(3)]
    rows.append(replace(branching(play, "4"), calls=[Call(0, "c", "tool", "{}", "x", "answered")]))
    ordered = [row for row in rows for _ in range(2)]  # two rows a shard
    named = [replace(row, trajectory_id=f"{row.trajectory_id}/{n % 2}", sample=n) for n, row in enumerate(ordered)]
    audited.add(named)
    rewrite_shard(audited.store, TRAJECTORIES, as_first_schema)
    with audited.evidence() as evidence:
        assert not evidence.intake.foreign
        found = evidence.database.all("select trajectory_id, turns, calls, branches from episodes order by 1")
        assert found == [(row.trajectory_id, len(row.turns), len(row.calls), 2 * bool(row.follows)) for row in named]
        follows = evidence.database.all("select follows from turns where trajectory_id = '0/0' order by turn")
        assert follows == [(-1,), (0,)]
    for check in ("broken_prefix", "template_drift", "repeated_calls", "tool_output_in_loss", "broken_answers"):
        audited.run(check)
