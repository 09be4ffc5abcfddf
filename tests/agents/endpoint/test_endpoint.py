"""An agent written against OpenAI's client is played as token-exact as one with queues."""

from dataclasses import replace

from storage.records import TRAJECTORY_SCHEMA, Trajectory, to_table
from tasks.agents.chat import Chat
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.agents.openai_agent import OpenAIAgent
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import ScriptedEngine, context, play

HERE = "tests.agents.endpoint.solvers"
RIGHT, WRONG = r"\boxed{3}", r"\boxed{4}"


def timeless(row: Trajectory) -> Trajectory:
    turns = [replace(turn, latency_s=0.0) for turn in row.turns]
    return replace(row, turns=turns, latency_s=0.0, started_at=0.0)


def test_two_turns_are_those_of_the_queue_agent(chat: Chat, verifier: Verifier) -> None:
    """The same agent in both forms gives the same record, except for what only the endpoint's tree knows."""
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    queues = play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier)
    endpoint = play(engine, OpenAIAgent(context(chat), entry=f"{HERE}:two_turns"), verifier)
    to_table(endpoint, TRAJECTORY_SCHEMA)
    assert [timeless(replace(row, follows=[])) for row in endpoint] == [timeless(row) for row in queues]
    assert endpoint[0].follows == [-1, 0]
