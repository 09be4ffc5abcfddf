"""A judge that is a script: a server with OpenAI's chat completions, in a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ScriptedJudge:
    """Answers each question with a status and a text, which was cut if it ends with …, or with bytes as they are."""

    script: Callable[[str], tuple[int, str | bytes]]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)  # of the requests, besides messages

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        (message,) = body.pop("messages")
        self.fields.append(body)
        self.asked.append(message["content"])
        self.keys.append(request.headers.get("Authorization"))
        status, text = self.script(message["content"])
        if isinstance(text, bytes):
            return web.Response(body=text, status=status, content_type="application/json")
        choice = {"message": {"content": text}, "finish_reason": "length" if text.endswith("…") else "stop"}
        return web.json_response({"choices": [choice]}, status=status)


@contextmanager
def scripted_judge(script: Callable[[str], tuple[int, str | bytes]]) -> Iterator[ScriptedJudge]:
    """Run a judge on a free port of loopback until the block ends."""
    judge, loop = ScriptedJudge(script), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", judge.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield judge
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
