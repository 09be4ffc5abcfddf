"""An OpenAI-compatible endpoint for each episode: token ids in and out of the engine, messages for the agent.

`protocol.py` has requests, answers and errors, `completions.py` answers what an agent sends and records what was
sampled in a tree of messages (`tree.py`), of which it makes a trajectory. `server.py` is the HTTP server of a rollout's
process, `agent.py` the base of agents. `tasks.agents.openai_agent` has the client without HTTP for agents in it.
"""
