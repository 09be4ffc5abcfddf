"""On the real server, a completion ends at any token that ends a turn, and this token is sampled like others."""

import asyncio

from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import load_chat
from tasks.inference.api import Completion, GenerationConfig
from tasks.inference.engine import Engine


def test_a_turn_ends_where_the_template_ends_it(engine: Engine, policies: list[Checkpoint]) -> None:
    """The server's own end of text is another token: only the request names this one."""
    policy = policies[0]
    engine.serve(policy)
    prompt = load_chat(policy).prompt([{"role": "user", "content": "What is 1 + 2?"}])

    async def generate(*ends: int) -> list[Completion]:
        gconfig = GenerationConfig(n=16, max_new_tokens=40, stop_token_ids=ends)
        async with engine.connect() as connection:
            return await connection.generate(prompt, gconfig, seed=1, replica=0)

    end = asyncio.run(generate())[0].token_ids[1]
    completions = asyncio.run(generate(end))
    assert [each for each in completions if end in each.token_ids[:-1]] == []
    ended = [each for each in completions if each.token_ids[-1] == end]
    assert ended
    assert all(each.finish_reason == "stop" and each.logprobs[-1] < 0 for each in ended)
    assert all(len(each.token_ids) == len(each.logprobs) for each in completions)
