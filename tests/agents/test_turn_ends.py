"""On the real server, turns end with the template's token even if the model's end of text is another token."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from configs import load
from configs.rollout import Rollout
from configs.train import PPO
from storage import layout
from storage.objects.store import Store
from storage.records import Problem, Trajectory
from storage.versions import checkpoints
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tasks.agents.chat import load_chat
from tasks.agents.interface import AgentContext
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.environments.interface import EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import GenerationConfig
from tasks.inference.engine import Engine
from tasks.rollout.collector import Collector
from tasks.rollout.plan import RolloutPlan
from tasks.score.verifier import Verifier
from tasks.warm_start.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IM_END
from tests.support.rollout_helpers import all_groups

ROOM = GenerationConfig(max_new_tokens=40)
PROBLEMS = [Problem(f"{n}+2", f"What is {n} + 2?", [str(n + 2)]) for n in range(4)]


@pytest.fixture(scope="module")
def foreign(checkpoint_store: Store, policy_folder: Path) -> Checkpoint:
    """Return a policy that ends its turns with the token that its template writes, `<|endoftext|>`.

    The server and the tokenizer's `eos_token` know only `<|im_end|>`. The output layer's rows of both are swapped.
    """
    import torch
    from transformers import AutoTokenizer

    from tasks.train.policy import load_policy, make_canary

    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(IM_END, END_OF_TEXT)
    ends = [tokenizer.encode(token)[0] for token in (IM_END, END_OF_TEXT)]
    model = load_policy(policy_folder, PPO())
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[ends] = rows[ends[::-1]].clone()
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        key, canary = layout.checkpoint("foreign", 0), make_canary(model)
        checkpoints.commit(checkpoint_store, key, Path(scratch), None, canary, Provenance(config={}), [], {})
    return checkpoints.open_checkpoint(checkpoint_store, key, Path(tempfile.mkdtemp()))


def play(engine: Engine, policy: Checkpoint, verifier: Verifier) -> list[Trajectory]:
    """Play four problems with at most two turns."""
    chat, played = load_chat(policy), list[Trajectory]()
    plan = RolloutPlan("foreign/000000", load("smoke"), 0, policy.version, "problems/x", ROOM, group_size=1)
    player = MathMultiTurnAgent(AgentContext(chat, ROOM, 128), num_turns=2)

    async def collect() -> None:
        async with engine.connect() as connection:
            context = EnvironmentContext(verifier)
            collector = Collector(connection, player, lambda: MathVerifyEnvironment(context), chat, Rollout())
            await collector.collect(all_groups(plan, PROBLEMS), plan.group_size, lambda _, rows: played.extend(rows))

    engine.serve(policy)
    asyncio.run(collect())
    return played


def test_a_turn_ends_where_the_template_ends_it(engine: Engine, foreign: Checkpoint, verifier: Verifier) -> None:
    """No completion continues after that token. It is sampled: in the mask, with a logprob, not truncated."""
    played = play(engine, foreign, verifier)
    end = load_chat(foreign).encode(END_OF_TEXT)[0]
    sampled = [(row, turn, row.token_ids[turn.start : turn.end]) for row in played for turn in row.turns]
    assert [ids for _, _, ids in sampled if end in ids[:-1]] == []
    ended = [(row, turn) for row, turn, ids in sampled if ids[-1] == end]
    assert ended
    for row, turn in ended:
        assert turn.finish_reason == "stop"
        assert row.action_mask[turn.end - 1]
        assert row.logprobs[turn.end - 1] < 0
        assert row.versions[turn.end - 1] == foreign.number
        assert END_OF_TEXT not in turn.text
        assert row.token_ids[turn.end : turn.end + 1] != [end]  # it is not written a second time
    assert {row.status for row in played if row.turns[-1].finish_reason == "stop"} == {"completed"}
