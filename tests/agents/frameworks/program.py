"""An agent that is a program with nothing but Python's library: it asks, computes what the policy calls, asks again."""

import json
import os
import sys
import urllib.request
from typing import Any

NUMBERS = {"type": "array", "items": {"type": "number"}}
PARAMETERS = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": PARAMETERS}}


def ask(messages: list[Any]) -> dict[str, Any]:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [ADD]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def main() -> None:
    """Call the tool until the policy answers; print the answer."""
    messages = [{"role": "user", "content": json.loads(sys.stdin.readline())["prompt"]}]
    while (message := ask(messages)).get("tool_calls"):
        messages.append(message)
        for call in message["tool_calls"]:
            result = sum(json.loads(call["function"]["arguments"])["numbers"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    print(message["content"])


if __name__ == "__main__":
    main()
