"""Finds the process of a vLLM server that computes, for tests that kill it."""

import psutil

from tasks.inference.server import Server


def engine_core(server: Server) -> psutil.Process:
    """Return the engine's process, a child of the one that takes requests."""
    (core,) = [each for each in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in each.name()]
    return core
