"""A vLLM server that the pipeline starts and always ends, on a Unix socket that only the pipeline's user can open."""

import asyncio
import contextlib
import glob
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TextIO

from configs.inference import Servers
from storage.processes.child import Child
from tasks.inference import launch
from tasks.inference.api import InferenceError
from tasks.inference.client import SILENT_S, Client
from tasks.inference.devices import check_split, cpu_build

logger = logging.getLogger(__name__)
_PROJECT = str(Path(__file__).parents[2])
_SEQUENCES = 512
"""Number of sequences that a server on a CPU samples at once."""
_SMALLEST_CACHE, _LARGEST_CACHE = 2**27, 2**30
"""Bytes of a CPU's cache of keys and values. A gigabyte takes vLLM a third of a second to fill with zeros."""
_ATTEMPTS = 3
"""Number of times that servers are given weights, if some end meanwhile."""


class Server(Child):
    """One vLLM process group, on a socket in its folder.

    Args:
        settings: `inference` of the configuration, or the knobs of a model beside the policy.
        log: file that receives the server's output.
        devices: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them; empty: all that this process may use.
        section: the section of its knobs, for messages.
        arguments: more arguments of vLLM.
    """

    def __init__(
        self,
        settings: Servers,
        log: Path,
        devices: Sequence[str] = (),
        section: str = "inference",
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(log)
        self.settings, self.devices, self._section, self._more = settings, devices, section, arguments
        self.adapted: list[str] = []
        """Its arguments for adapters."""
        self._model: Path | None = None
        """The weights with which it starts or has started; None if it does not run."""
        self._socket = self.folder / "vllm"
        self.url = f"unix://{self._socket}"
        self._pipe: TextIO | None = None
        """It takes the arguments of a process that has begun."""

    def begin(self) -> None:
        """Start the process, which imports vLLM and then waits for `start_serving`."""
        reading, writing = os.pipe()
        self._pipe = os.fdopen(writing, "w")
        command = [sys.executable, "-P", launch.__file__, str(reading)]
        command += ["without-compiler"] if self.settings.enforce_eager and cpu_build() else []
        with os.fdopen(reading):
            self.start(command, self._environment(), [reading])

    def start_serving(self, model: Path, adapted: Sequence[str] = ()) -> None:
        """Start the server without waiting, unless it starts or serves with these; `wait_until_healthy` waits.

        One that runs with others is started again.

        Args:
            model: the weights.
            adapted: its arguments for adapters.

        Raises:
            InferenceError: the model cannot be divided among so many devices, or vLLM could not read its path.
        """
        if self.pid and (self._model, self.adapted) == (model, [*adapted]):
            return
        logger.info("starting vLLM for %s at %s; its log is %s", self._section, self.url, self.log)
        try:
            check_split(self.settings, json.loads((model / "config.json").read_bytes()), self._section)
        except ValueError as error:
            raise InferenceError(str(error)) from None
        if glob.escape(str(model.resolve())) != str(model.resolve()):
            raise InferenceError(f"vLLM takes {model.resolve()} for a pattern: move it to a path without *, ? and [")
        if self._pipe is None or not self.alive:
            self.stop()
            self.begin()
        self.adapted = [*adapted]
        assert self._pipe
        with contextlib.suppress(BrokenPipeError), self._pipe as pipe:  # who waits for it sees that it has ended
            json.dump(self._arguments(model), pipe)
        self._pipe, self._model = None, model

    def stop(self) -> None:
        """End the server, and remove the memory that its ranks shared on a CPU, which vLLM leaves behind."""
        self._model, meetings = None, [*self.folder.glob("vllm_dist_*")]
        super().stop()
        for left in (left for file in meetings for left in Path("/dev/shm").glob(f"{file.name}-*")):
            left.unlink(missing_ok=True)

    def wait_until_healthy(self) -> None:
        """Block until the server answers.

        Raises:
            InferenceError: it ended or took longer than `startup_timeout_s`; contains the log's last lines.
        """
        asyncio.run(self._await_health())

    async def _await_health(self) -> None:
        started, limit_s = time.monotonic(), self.settings.startup_timeout_s
        async with Client(self.url, None, 5, self.settings.max_model_len) as client:
            while await client.health() != HTTPStatus.OK:
                late = time.monotonic() - started > limit_s
                if late or not self.alive:
                    self.stop()
                    after = f"was not healthy after {self._section}.startup_timeout_s={limit_s:g}"
                    problem = after if late else "ended while starting"
                    raise InferenceError(f"vLLM {problem}; the end of {self.log}:\n{self.why()}")
                await asyncio.sleep(0.05)
        logger.info("vLLM is up at %s after %.1f s", self.url, time.monotonic() - started)

    def lost(self) -> bool:
        """Return whether the server has ended, or its engine, which is another process. One that is silent is ended."""

        async def answers() -> bool:
            async with Client(self.url, None, SILENT_S, self.settings.max_model_len) as client:
                return await client.answers()

        if self.pid and not (self.alive and asyncio.run(answers())):
            logger.warning("vLLM at %s has died; the end of its log:\n%s", self.url, self.why())
            self.stop()
        return not self.alive

    def why(self) -> str:
        """Return the log's last lines but for tracebacks that name another one, of the engine, as the root cause."""
        lines = self.log_tail(2000).splitlines()
        while summaries := [number for number, line in enumerate(lines) if "root cause" in line]:
            begun = [number for number, line in enumerate(lines[: summaries[-1]]) if "Traceback (most recent" in line]
            del lines[max(begun, default=summaries[-1]) : summaries[-1] + 1]
        return "\n".join(lines[-15:])

    def _arguments(self, model: Path) -> list[str]:
        settings = self.settings
        command = [
            *("--model", str(model.resolve())),
            *("--uds", str(self._socket), "--served-model-name", "policy"),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--worker-extension-cls", "tasks.inference.worker.PolicyWorker"),
            *("--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)),
            *("--gpu-memory-utilization", str(settings.gpu_memory_utilization)),
            *("--tensor-parallel-size", str(settings.tensor_parallel)),
            *("--pipeline-parallel-size", str(settings.pipeline_parallel)),
            "--disable-uvicorn-access-log",
        ]
        if settings.ranks > 1:
            command += ["--distributed-executor-backend", "mp"]  # also below a worker that Ray has started
        if settings.enforce_eager:
            command.append("--enforce-eager")
        if cpu_build():
            # A seeded request whose prompt is processed in parts ends vLLM's CPU worker (Generator.get_offset).
            command.append("--no-enable-chunked-prefill")
            # A step of a small model costs little more with 512 sequences than with 128, the default on a CPU. Prompts
            # share whole blocks only, and most of ours are shorter than 128 tokens, the default.
            # The cache holds twice as many full contexts as are sampled at once: others wait for an environment.
            tokens = 2 * _SEQUENCES * settings.max_model_len
            cache = _cache_bytes(json.loads((model / "config.json").read_bytes()), tokens)
            command += ["--kv-cache-memory-bytes", str(cache)]
            command += ["--max-num-seqs", str(_SEQUENCES), "--block-size", "32"]
        return [*command, *self._more, *self.adapted, *settings.extra_args]  # which may give more

    def _environment(self) -> dict[str, str]:
        # The key belongs to servers given by URL; no other user can reach ours. The second variable would override
        # --kv-cache-memory-bytes.
        left_out = ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        if cpu_build():
            # vLLM uses one more process for its worker, only to bind its threads to cores. For a small model that costs
            # a third of the start and half of the tokens/s.
            environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            if self.settings.ranks > 1:
                # Otherwise each rank wants a NUMA node of its own, to bind its threads to.
                environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if self.settings.enforce_eager:
            # Otherwise vLLM still compiles parts of its sampler, which takes seconds and needs a C++ compiler.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, [_PROJECT, os.environ.get("PYTHONPATH")])),  # for its workers
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_RPC_BASE_PATH": str(self.folder),  # sockets among vLLM's processes
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",  # through which its ranks meet
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(self.settings.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",  # checkpoints are local at this point
        }


def start_all(servers: Sequence[Server], model: Path, adapted: Sequence[str] = ()) -> None:
    """Start servers, and wait until all answer; see `start_serving` and `wait_until_healthy`."""
    for server in servers:
        server.start_serving(model, adapted)
    for server in servers:
        server.wait_until_healthy()


def _cache_bytes(model: Mapping[str, Any], tokens: int) -> int:
    """Return the bytes of the keys and values of so many tokens, within limits; the most if the sizes are not known."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, width = (int(model.get(name) or 0) for name in names)
    if not (layers and heads and width):
        return _LARGEST_CACHE
    cached, size = int(model.get("num_key_value_heads") or heads), int(model.get("head_dim") or width // heads)
    return max(_SMALLEST_CACHE, min(_LARGEST_CACHE, 2 * 4 * layers * cached * size * tokens))


Restart = Callable[[Sequence[Server]], None]
Prove = Callable[[], Coroutine[Any, Any, None]]


def bring_in(servers: Sequence[Server], restart: Restart, prove: Prove, attempts: int = _ATTEMPTS) -> None:
    """Start the servers that are lost, give all their weights with `prove`, which proves these; again if some end.

    Raises:
        InferenceError: it fails though all live, or some are lost each time.
    """
    if lost := [server for server in servers if server.lost()]:
        restart(lost)
    try:
        asyncio.run(prove())
    except InferenceError as error:
        if attempts == 1 or not any(server.lost() for server in servers):
            raise
        logger.warning("%s", error)
        bring_in(servers, restart, prove, attempts - 1)
