"""The knobs of the vLLM servers."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from configs.knobs import URI, Knobs, Share
from configs.safety import check_extra_args

SERVER = r"^((?i:https?)://[^/].*|unix://.+)$"
RETURN_EXPERTS = "--enable-return-routed-experts"
"""The argument of vLLM with which it returns the experts that it chose."""

FLOAT32_TOLERANCE = 1e-4
"""Largest mean difference of logprobs that float32 explains, in nats."""


class Servers(Knobs):
    """The knobs that vLLM servers have for any model."""

    tensor_parallel: PositiveInt = 1
    """Number of GPUs among which a server divides every layer, for a model that is too large for one. It must divide
    the attention heads. On a CPU it is the number of a server's processes."""
    pipeline_parallel: PositiveInt = 1
    """Number of groups of layers in a server, each on `tensor_parallel` GPUs of its own. All are on one host. Divide
    layers first: this is for what is too large even then, or for GPUs without fast links."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the served weights."""
    max_model_len: PositiveInt = 2048
    """Length of the context in tokens: prompt, turns and feedback together."""
    gpu_memory_utilization: Share = 0.9
    """Share of the GPU's memory that a server takes (GPU only)."""
    threads: PositiveInt = 1
    """Number of OpenMP threads of a server (CPU only)."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs: servers start sooner, but run slower on GPUs."""
    startup_timeout_s: PositiveFloat = 600
    """A server that is not healthy after so many seconds is an error."""
    extra_args: Annotated[list[str], AfterValidator(check_extra_args)] = []
    """More command line arguments for vLLM, such as [--max-num-seqs, "512"]. Arguments that change where it listens or
    what it serves, or that run other code, are refused."""

    @property
    def ranks(self) -> int:
        """The number of GPUs of one server, or on a CPU of its processes that compute."""
        return self.tensor_parallel * self.pipeline_parallel


class Inference(Servers):
    """The servers of the policy."""

    urls: list[Annotated[URI, Field(pattern=SERVER)]] = []
    """vLLM servers to use, such as http://127.0.0.1:8000 or unix:///run/vllm; empty: the pipeline starts `replicas`.
    Such servers need --enable-scale-out, VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and access to the
    checkpoint files. Their API key is read from the environment (VLLM_API_KEY). A command does not know what they
    serve, so its first swap sets their weights to 0. With --worker-extension-cls tasks.inference.worker.PolicyWorker
    and this project in PYTHONPATH they tell which weights they hold: needed in half precision, and for tied embeddings
    on a CPU. Whoever reaches the routes of VLLM_SERVER_DEV_MODE can change weights and write files, without the key: on
    this machine give --uds a path in a folder with mode 0700, over a network let a proxy ask for the key on every route
    (tasks/inference/README.md)."""
    replicas: PositiveInt = 1
    """Number of servers to start if no URLs are given. Each gets its own GPUs out of CUDA_VISIBLE_DEVICES, or out of
    all GPUs if that is not set. Too few GPUs are an error. Servers take the last GPUs and the trainer takes the first
    one, which it shares with a server only if no GPU is free."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference between the server's and the trainer's logprobs of the canary, a fixed sequence. null:
    1e-4 in float32, and none in half precision, where the sums of all weights that the server holds are the proof."""

    @property
    def tolerance(self) -> float | None:
        """The canary's tolerance in nats; None if any difference is allowed."""
        return self.canary_tolerance or (FLOAT32_TOLERANCE if self.dtype == "float32" else None)
