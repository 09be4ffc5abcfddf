"""A program that is an agent: it asks once, leaves a process in a group of its own, and prints the answer."""

import json
import os
import subprocess
import sys
import urllib.request

problem = json.loads(sys.stdin.readline())
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": problem["prompt"]}]}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    content = json.load(answer)["choices"][0]["message"]["content"]
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(content)
