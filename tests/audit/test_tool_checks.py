"""Checks of calls of tools: each finds what it is for, and leaves alone what looks like it and is right."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from configs.audit import Audit
from storage.objects.store import Store
from storage.records import Call, CallStatus, Problem, Trajectory
from tasks.agents.interface import EpisodeSpec
from tasks.audit.checks import SkippedError, all_checks
from tasks.score.verifier import Verifier
from tests.support.audit_play import SUM, Audited, Play
from tests.support.branching import Branching
from tests.support.train_helpers import make_trajectory


@pytest.fixture(scope="module")
def play() -> Play:
    from tests.support.qwen3_tokenizer import build_qwen3_tokenizer

    return Play(build_qwen3_tokenizer())


def call(output: str, arguments: str = "{}", name: str = "tool", status: CallStatus = "answered") -> Call:
    return Call(0, "c", name, arguments, output, status)


def written(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def given(*outputs: str) -> str:
    return "\n".join(f"<tool_response>\n{output}\n</tool_response>" for output in outputs)


def begin(play: Play, name: str, problem: Problem = SUM) -> Branching:
    row = replace(make_trajectory(name, [], problem=problem.problem_id), prompt=problem.prompt)
    return Branching(play.chat, EpisodeSpec(name, problem, 0, replace(row, solutions=problem.solutions)))


def called(play: Play, name: str, *calls: Call, problem: Problem = SUM, answer: str = r"\boxed{19}") -> Trajectory:
    """Return an episode that makes these calls one after another, and answers."""
    episode, node, told = begin(play, name, problem), None, problem.prompt
    for made in calls:
        node = episode.say(written(made), node, told, calls=[made])
        told = given(made.output)
        if made.status in ("answered", "failed"):
            node.feedback = made.output
    episode.say(answer, node, told, verdict="wrong")
    return episode.trajectory()


def one_turn(row: Trajectory) -> Trajectory:
    """Take everything after the prompt for one completion."""
    first, last = row.turns[0], row.turns[-1]
    mask = [place >= first.start for place in range(len(row.token_ids))]
    return replace(row, turns=[replace(last, start=first.start)], action_mask=mask, follows=[], ungraded=[])


def output_as_turn(row: Trajectory, play: Play) -> Trajectory:
    """Take the output in its marks for a turn of its own."""
    first, last = row.turns
    ids = row.token_ids
    (opens,), (closes,) = (play.chat.encode(mark) for mark in ("<tool_response>", "</tool_response>"))
    begin = ids.index(opens, first.end)
    end = ids.index(closes, begin) + 1
    mask = [sampled or begin <= place < end for place, sampled in enumerate(row.action_mask)]
    turns = [first, replace(first, start=begin, end=end), last]
    return replace(row, turns=turns, action_mask=mask, follows=[], ungraded=[])


def mask_forgets(row: Trajectory) -> Trajectory:
    """Mark the tokens between two turns as sampled."""
    begin = row.turns[0].start
    return replace(row, action_mask=[place >= begin for place in range(len(row.token_ids))])


def test_outputs_in_the_loss(audited: Audited, play: Play) -> None:
    """Three ways to train on an output are found; calls and answers with the text of an output are not."""
    right = called(play, "right", call("19"), answer="19")
    invented = called(play, "invented", replace(call("18"), arguments="{}"), answer=given("18") + " It is 18.")
    same = called(play, "same", call("3", '{"a": 3}'))
    wrong = {"one": one_turn, "turn": lambda row: output_as_turn(row, play), "mask": mask_forgets}
    rows = [spoil(called(play, name, call("19"))) for name, spoil in wrong.items()]
    rows += [spoil(called(play, f"long {name}", call("line 1\n\nline 2"))) for name, spoil in wrong.items()]
    audited.add([right, invented, same, *rows])
    measured, found = audited.run("tool_output_in_loss")
    assert [name for name, _ in found] == sorted(row.trajectory_id for row in rows)
    assert (measured.value, measured.of) == (6, 9)


def test_outputs_of_parallel_calls_and_branches_are_given(audited: Audited, play: Play) -> None:
    """Two outputs in one message, and outputs that two branches were given, are neither drift nor in the loss."""
    episode, calls = begin(play, "a"), [call("4"), call("6")]
    first = episode.say("\n".join(map(written, calls)), told=SUM.prompt, calls=calls)
    first.feedback = "4\n6"
    for text in ("18", "20"):
        episode.say(text, first, given("4", "6"), verdict="wrong")
    audited.add([episode.trajectory()])
    for check in ("tool_output_in_loss", "template_drift", "leaked_answers", "broken_prefix", "mask_and_spans"):
        measured, found = audited.run(check)
        assert (measured.value, found) == (0, []), check


def test_shares_of_calls(audited: Audited, play: Play) -> None:
    """Each share is that of its status; failed calls count among calls with an output, and of few calls never."""
    counts: dict[CallStatus, int] = {"answered": 21, "failed": 7, "unparsable": 3, "unanswered": 2}
    statuses = [status for status, count in counts.items() for _ in range(count)]
    rows = [called(play, f"{n:02}", call("x", status=status)) for n, status in enumerate(statuses)]
    audited.add([*rows, called(play, "other", call("error", name="other", status="failed"))])
    assert audited.run("unanswered_calls")[0].value == pytest.approx(2 / 34)
    assert audited.run("unparsable_calls")[0].value == pytest.approx(3 / 34)
    measured, found = audited.run("tool_errors")
    assert (measured.value, measured.of) == (0.25, 29)
    assert len(found) == 8
    assert "8 of 29 calls failed (27.6%); the highest share, 25.0% of 28 calls, is that of tool in" in measured.says


def test_repeated_calls_are_those_of_one_conversation(audited: Audited, play: Play) -> None:
    """Three equal calls after each other are found, in rewritten histories, too; those of three branches are not."""
    made, loop, branches = call("none"), begin(play, "loop"), begin(play, "branches")
    node = None
    for number in range(3):
        node = loop.say(written(made), node, given("none"), calls=[made], rewritten=number == 2)
    root = branches.say("Hm.", told=SUM.prompt)
    for told in ("one", "two", "three"):
        branches.say(written(made), root, told, calls=[made])
    other = [call("none", f'{{"page": {page}}}') for page in range(4)]
    audited.add([loop.trajectory(), branches.trajectory(), called(play, "pages", *other)])
    measured, found = audited.run("repeated_calls")
    assert measured.value == pytest.approx(1 / 3)
    assert found == [("loop", "it calls tool 3 times with the arguments {}")]


def problems(count: int) -> list[Problem]:
    return [
        Problem(str(number), f"What is {number} + {number}?", [str(2 * number)]) for number in range(50, 50 + count)
    ]


Says = Callable[[Problem], Sequence[Call]]


@pytest.mark.parametrize(
    ("calls", "leaks"),
    [
        (lambda problem: [call(f"The answer is {problem.solutions[0]}.", '{"q": "sum"}')], True),
        (lambda problem: [call(problem.solutions[0])], True),  # the same arguments, and yet each problem's gold
        (lambda problem: [call(problem.solutions[0], f'{{"e": "{problem.prompt}"}}')], False),  # a calculator
        (
            lambda problem: [call(f"The answer is {problem.solutions[0]}", f'{{"code": "answer = {problem.prompt}"}}')],
            False,
        ),
        (lambda problem: [call("", '{"code": "x = 1"}'), call(problem.solutions[0], '{"code": "x"}')], False),
        (lambda problem: [call(f"{problem.problem_id}: {[*range(200)]}")], False),  # a table has everyone's answer
        (lambda _: [call("Example: the answer is 100.", '{"q": "help"}')], False),  # right once, by chance
    ],
)
def test_leaks_of_tools(audited: Audited, play: Play, calls: Says, leaks: bool) -> None:
    """Outputs that give gold answers away are told from those that tools computed."""
    audited.add([called(play, each.problem_id, *calls(each), problem=each, answer="?") for each in problems(4)])
    measured, found = audited.run("leaked_by_tool")
    assert [name for name, _ in found] == ([each.problem_id for each in problems(4)] if leaks else [])
    assert measured.value == len(found)


def test_feedback_of_agents_is_told_from_outputs(audited: Audited, play: Play) -> None:
    """A calculator may say the gold answer; what the agent adds to it may not."""
    row = called(play, "told", call("19"), answer="18")
    added = replace(row.turns[0], feedback="19\nNo, it is 19.")
    audited.add([called(play, "fine", call("19"), answer="18"), replace(row, turns=[added, *row.turns[1:]])])
    assert [name for name, _ in audited.run("leaked_answers")[1]] == ["told"]


def test_without_calls_checks_of_tools_say_so(audited: Audited, play: Play) -> None:
    """A check that had nothing to check has not passed."""
    audited.add([play("a", "18", "19")])
    with audited.evidence(Audit()) as evidence:
        skipped = [
            name for name, check in all_checks().items() if evidence.lacks(check.needs) == "no turn calls a tool"
        ]
    assert len(skipped) == 6


def test_without_a_tokenizer_outputs_are_not_searched(
    store: Store, tmp_path: Path, verifier: Verifier, play: Play
) -> None:
    """The check that reads tokens says that it cannot; the others need none."""
    audited = Audited(store, tmp_path, verifier)
    audited.add([called(play, "a", call("19"))], parents=[])
    with pytest.raises(SkippedError, match="no tokenizer"):
        audited.run("tool_output_in_loss")
    assert audited.run("repeated_calls")[0].of == 1
