"""Conversations with tools as token ids, and completions as messages, for agents that speak OpenAI's chat format.

`interface.py` says what a renderer does. `library.py` uses the package `renderers` for the model families that it
knows, `template.py` the model's own chat template for all others; `choice.py` chooses.
"""
