"""Checks, before a policy is committed, that the configured agent can play it."""

import asyncio
import json
from pathlib import Path

from configs import Config
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext
from tasks.inference.api import GenerationConfig
from tasks.warm_start.soundness import PolicyError


def try_out(folder: Path, config: Config) -> Chat:
    """Load the tokenizer, render toy conversations with its chat template, and make the agent; return the chat.

    The agent is made inside an event loop, as in a rollout.

    Raises:
        PolicyError: the template fails, no token ends a turn, or the policy's context is shorter than
            `inference.max_model_len`.
        ValueError: the agent cannot be made.
    """
    where = f"policy.path={config.policy.path!r}" if config.policy.path else "the policy of the warm start"
    _check_context(where, folder, config.inference.max_model_len)
    chat = _chat(where, folder)
    if not chat.stop_token_ids:
        raise PolicyError(f"{where}: nothing ends a turn: set eos_token in tokenizer_config.json")
    gconfig = GenerationConfig(max_new_tokens=config.sampling.max_new_tokens)
    asyncio.run(_make_agent(config, AgentContext(chat, gconfig, config.inference.max_model_len)))
    return chat


async def _make_agent(config: Config, context: AgentContext) -> None:
    AGENTS.make(config.agent.type, context, config.agent.args)


def _chat(where: str, folder: Path) -> Chat:
    from transformers import AutoTokenizer

    from tasks.agents.chat import engine_ends, open_chat

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer.name_or_path = where  # errors then name what the user gave, not the scratch folder
    try:
        return open_chat(tokenizer, ends=engine_ends(folder))
    except ValueError as error:
        raise PolicyError(str(error)) from error


def _check_context(where: str, folder: Path, asked: int) -> None:
    """Check the context length; leave models with scaled positions (`rope_scaling`) to the server's check.

    Their context is longer than `max_position_embeddings`.
    """
    values = json.loads((folder / "config.json").read_bytes())
    positions = values.get("max_position_embeddings")
    scaled = '"factor"' in json.dumps([values.get(key) for key in ("rope_scaling", "rope_parameters")])
    if isinstance(positions, int) and not scaled and positions < asked:
        raise PolicyError(
            f"{where}: its context is {positions} tokens (max_position_embeddings in config.json), "
            f"inference.max_model_len={asked} asks for more: set it to {positions} at most"
        )
