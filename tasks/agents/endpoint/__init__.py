"""An OpenAI-compatible endpoint for each episode: token ids in and out of the engine, messages for the agent.

`requests.py` checks what an agent sends, `completions.py` answers it and records what was sampled in a tree of
messages (`tree.py`), `answers.py` has the bodies of answers, `recording.py` makes a trajectory of the tree.
`server.py` is the HTTP server of a rollout's process, `client.py` the client without HTTP for agents in it.
"""
