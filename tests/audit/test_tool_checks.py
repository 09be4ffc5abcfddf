"""Checks of calls of tools: each finds what it is for, and leaves alone what looks like it and is right."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from storage.records import Call, Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.audit.checks import SkippedError, all_checks
from tests.support.audit_play import SUM, Audited, Play
from tests.support.branching import begin
from tests.support.planted_faults import call, written


@pytest.fixture(scope="module")
def play(qwen3: Chat) -> Play:
    return Play(qwen3.tokenizer)


def given(*outputs: str) -> str:
    return "\n".join(f"<tool_response>\n{output}\n</tool_response>" for output in outputs)


def called(play: Play, name: str, *calls: Call, problem: Problem = SUM, answer: str = r"\boxed{19}") -> Trajectory:
    """Return an episode that makes these calls one after another, and answers."""
    episode, node, told = begin(play.chat, name, problem), None, problem.prompt
    for made in calls:
        node = episode.say(written(made), node, told, calls=[made])
        told = given(made.output)
        if made.status in ("answered", "failed"):
            node.feedback = made.output
    episode.say(answer, node, told, verdict="wrong")
    return episode.trajectory()


def test_outputs_in_the_loss(audited: Audited, play: Play) -> None:
    """Two ways to train on an output are found; calls and answers with the text of an output are not."""
    right = called(play, "right", call("19"), answer="19")
    invented = called(play, "invented", replace(call("18"), arguments="{}"), answer=given("18") + " It is 18.")
    same = called(play, "same", call("3", '{"a": 3}'))
    one = called(play, "one", call("line 1\n\nline 2"))
    mask = [position >= one.turns[0].start for position in range(len(one.token_ids))]
    turn = replace(one.turns[-1], start=one.turns[0].start)
    one = replace(one, turns=[turn], action_mask=mask, follows=[], ungraded=[])
    audited.add([right, invented, same, one, replace(called(play, "mask", call("line 1\n\nline 2")), action_mask=mask)])
    measured, found = audited.run("tool_output_in_loss")
    assert [name for name, _ in found] == ["mask", "one"]
    assert (measured.value, measured.of) == (2, 5)


def test_repeated_calls_are_those_of_one_conversation(audited: Audited, play: Play) -> None:
    """Three equal calls after each other are found, in rewritten histories, too; those of three branches are not."""
    made, loop, branches = call("none"), begin(play.chat, "loop", SUM), begin(play.chat, "branches", SUM)
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
    assert found == [("loop", "it calls calculator 3 times with the arguments {}")]


PROBLEMS = [Problem(f"{number}", f"What is {number} + {number}?", [f"{2 * number}"]) for number in range(50, 54)]


@pytest.mark.parametrize(
    ("calls", "leaks"),
    [
        (lambda problem: [call(f"The answer is {problem.solutions[0]}.", '{"q": "sum"}')], True),
        (lambda problem: [call(problem.solutions[0])], True),  # the same arguments, and yet each problem's gold
        (lambda problem: [call(problem.solutions[0], f'{{"e": "{problem.prompt}"}}')], False),  # a calculator
        (lambda problem: [call("", '{"code": "x = 1"}'), call(problem.solutions[0], '{"code": "x"}')], False),
        (lambda problem: [call(f"{problem.problem_id}: {[*range(200)]}")], False),  # a table has everyone's answer
        (lambda _: [call("Example: the answer is 100.", '{"q": "help"}')], False),  # right once, by chance
    ],
)
def test_leaks_of_tools(audited: Audited, play: Play, calls: Callable[[Problem], Sequence[Call]], leaks: bool) -> None:
    """Outputs that give gold answers away are told from those that tools computed."""
    audited.add([called(play, each.problem_id, *calls(each), problem=each, answer="?") for each in PROBLEMS])
    measured, found = audited.run("leaked_by_tool")
    assert [name for name, _ in found] == ([each.problem_id for each in PROBLEMS] if leaks else [])
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
    needs = [check.needs for check in all_checks().values() if "calls" in check.needs.split()]
    assert len(needs) == 6
    with audited.evidence() as evidence:
        for each in needs:
            with pytest.raises(SkippedError, match="no turn calls a tool"):
                evidence.left_out(each)
