"""The program of a vLLM server: it imports vLLM, and then reads from a pipe the arguments with which it serves.

The imports take longest and need no arguments, so they may begin before it is known what is served. If the pipe is
closed without arguments, the program ends.

    python -P launch.py FD [without-compiler]
"""

import json
import os
import sys
from typing import Any

from storage.processes.child import end_with_parent
from storage.processes.imports import fast_imports


def main(descriptor: int, *, compiler: bool) -> None:
    """Import vLLM, with or without torch's compiler, read a JSON list of arguments from `descriptor`, and serve."""
    with fast_imports("scipy"):  # which vLLM uses for audio, and transformers for the losses of images
        if not compiler:
            _leave_out_compiler()
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.platforms import current_platform
    # A forked engine has the server's socket, too: as long as it lives, requests to a dead server wait for an answer.
    os.register_at_fork(after_in_child=end_with_parent)
    if current_platform.is_cpu():
        _fork_engine(type(current_platform))
    with os.fdopen(descriptor) as pipe:
        arguments = pipe.read()
    if arguments:
        sys.argv[1:] = json.loads(arguments)
        entry.main()  # type: ignore[no-untyped-call] # vLLM has no types


def _leave_out_compiler() -> None:
    """Import vLLM without torch's compiler, which is switched off: patches and decorators would import it."""
    import torch

    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    with fast_imports("torch._inductor"):
        import vllm  # noqa: F401


def _fork_engine(platform: Any) -> None:
    """Let vLLM fork its engine's process on a CPU, as it does on GPUs: a new one would import all of this again.

    Workers in processes of their own are still new ones, since vLLM sets their threads by environment variables.
    """
    check = platform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        if config.parallel_config.distributed_executor_backend == "uni":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check_and_fork)


if __name__ == "__main__":
    main(int(sys.argv[1]), compiler="without-compiler" not in sys.argv)
