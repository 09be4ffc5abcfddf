"""A vLLM server that the pipeline starts itself, on loopback, and always ends."""

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from configs.schema import Inference
from tasks.inference import supervisor
from tasks.inference.api import InferenceError
from tasks.inference.devices import cpu_build

logger = logging.getLogger(__name__)

SERVED_NAME = "policy"


class Server:
    """One vLLM process group.

    Args:
        settings: the configuration's `inference`.
        log: file that receives the server's output.
        devices: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them; none: all that this process may use.
    """

    def __init__(self, settings: Inference, log: Path, devices: Sequence[str] = ()) -> None:
        self.settings, self.log, self.devices = settings, log, devices
        self.api_key = secrets.token_urlsafe(24)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the supervisor, the parent of the server's process group."""
        return self._process.pid if self._process else None

    def start(self, model: Path) -> None:
        """Start without waiting; `wait_until_healthy` waits."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, supervisor.__file__, str(self.log), *self._command(model)]
        # A session of its own: Ctrl-C in the terminal reaches the pipeline, which then ends the server.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=self._environment(), start_new_session=True
        )

    def wait_until_healthy(self) -> None:
        """Block until the server answers.

        Raises:
            InferenceError: it ended or took longer than `startup_timeout_s`; holds the log's last lines.
        """
        started = time.monotonic()
        while not self._healthy():
            if not self.alive:
                raise InferenceError(f"vLLM ended while starting; the end of {self.log}:\n{self._log_tail()}")
            if time.monotonic() - started > self.settings.startup_timeout_s:
                self.stop()
                raise InferenceError(
                    f"vLLM was not healthy after inference.startup_timeout_s={self.settings.startup_timeout_s:g}; "
                    f"the end of {self.log}:\n{self._log_tail()}"
                )
            time.sleep(0.2)
        logger.info("vLLM is up at %s after %.1f s", self.url, time.monotonic() - started)

    def stop(self) -> None:
        """End the process group; returns when it is gone."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # the supervisor ends the group on end of file
        try:
            self._process.wait(timeout=supervisor.GRACE_S + 10)
        finally:
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _log_tail(self, lines: int = 15) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _command(self, model: Path) -> list[str]:
        settings = self.settings
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", SERVED_NAME]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
        command += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization), "--disable-log-stats"]
        command += ["--disable-uvicorn-access-log"]
        if settings.enforce_eager:
            command.append("--enforce-eager")
        if cpu_build():
            # A seeded request whose prompt is processed in parts ends vLLM's CPU worker (Generator.get_offset).
            command.append("--no-enable-chunked-prefill")
        return command + settings.extra_args

    def _environment(self) -> dict[str, str]:
        # vLLM compiles parts of its sampler all the same, which takes seconds and a C++ compiler.
        eager = {"TORCHDYNAMO_DISABLE": "1"} if self.settings.enforce_eager else {}
        # On a CPU vLLM would put its worker into one more process, only to bind its threads to cores. For a small model
        # that is a third of the start and half of the tokens/s.
        together = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if cpu_build() else {}
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}
        return (
            together
            | os.environ
            | eager
            | devices
            | {
                "VLLM_API_KEY": self.api_key,  # not an argument, which every user of the machine could read
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(self.settings.kv_cache_gib),
                "OMP_NUM_THREADS": str(self.settings.threads),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",  # checkpoints are local by now
            }
        )


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
