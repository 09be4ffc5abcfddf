"""An HTTP server that answers as vLLM does, after some time; each answer has another text.

python -m tests.support.waiting_server SOCKET SECONDS TOKENS     seconds and tokens of a completion
"""

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import orjson
from aiohttp import web

from storage.versions.checkpoints import Checkpoint
from tasks.inference.engine import Engine, _Replica
from tests.support.waiting_engine import IM_END

_TAIL = 16
"""Characters at the end of an answer that differ from those of other answers."""


class UnprovenEngine(Engine):
    """An engine that does not ask its servers which weights they have."""

    async def _establish(self, replicas: Sequence[_Replica], policy: Checkpoint) -> None:
        pass


@contextmanager
def waiting_servers(folder: Path, count: int, seconds: float, tokens: int) -> Iterator[list[str]]:
    """Start servers; yield their URLs."""
    sockets = [folder / f"{number}" for number in range(count)]
    arguments = [sys.executable, "-m", "tests.support.waiting_server"]
    servers = [Popen([*arguments, str(path), str(seconds), str(tokens)], stdin=PIPE, stdout=PIPE) for path in sockets]
    try:
        for server in servers:
            assert server.stdout
            assert server.stdout.readline() == b"ready\n"
        yield [f"unix://{path}" for path in sockets]
    finally:
        for server in servers:
            server.communicate()  # it ends with its standard input


def answer(body: dict[str, Any], tokens: int) -> bytes:
    """Return the body of an answer with letters, a boxed number and the end of the turn."""
    parameters = body["sampling_params"]
    choices = [_choice(index, parameters["seed"] + index, tokens) for index in range(parameters["n"])]
    return orjson.dumps({"request_id": "generate-tokens-0", "prompt_logprobs": None, "choices": choices})


def _choice(index: int, seed: int, tokens: int) -> dict[str, Any]:
    draw = random.Random(seed)
    text = f"{''.join(draw.choices('abcdefgh', k=_TAIL - 11))} \\boxed{{{draw.randrange(10, 40)}}}"
    ids = [*(4 + ord(character) - ord(" ") for character in text[-tokens + 1 :]), IM_END]
    ids = [69 + number % 8 for number in range(tokens - len(ids))] + ids
    entries = [{"token_id": token, "logprob": -0.30981874465942383, "rank": 1} for token in ids]
    return {
        "index": index,
        "finish_reason": "stop",
        "stop_reason": IM_END,
        "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]},
    }


async def serve(path: str, seconds: float, tokens: int) -> None:
    """Answer until standard input ends."""

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(seconds)
        return web.Response(body=answer(body, tokens), content_type="application/json")

    application = web.Application()
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, path, backlog=4096).start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
