"""Mixtures of experts in vLLM: which experts it chose for each token.

With `--enable-return-routed-experts` each completion comes with the experts of all tokens that were read: base64 of a
file in NumPy's format .npy, [prompt + completion - 1, layers, experts per token]. The last token was not read. vLLM
demands its Model Runner V2 and prefix caching for it.
"""

import importlib.util
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from configs.inference import RETURN_EXPERTS
from storage.experts import pack, unpack
from tasks.inference.api import InferenceError
from tasks.inference.devices import cpu_build


def refuse_without_runner(arguments: Sequence[str]) -> None:
    """Refuse to start a server that could not return experts, by the arguments of its command.

    Raises:
        InferenceError: the experts are wanted, but this build of vLLM has no Model Runner V2.
    """
    if RETURN_EXPERTS in arguments and cpu_build() and not importlib.util.find_spec("triton"):
        raise InferenceError(
            "train.routing_replay=true needs the experts that the engine chose, and vLLM returns them with its Model "
            "Runner V2 only. Its CPU build has none without a Triton for CPUs, which is no package: use a GPU, give "
            "servers in inference.urls that return them, or leave the knob out"
        )


def experts_of(choice: dict[str, Any], prompt: int, *, cut: bool = False) -> bytes:
    """Return the experts of a choice of a server's answer, as `storage.experts` packs them.

    Args:
        choice: an entry of `choices`.
        prompt: number of tokens of the prompt.
        cut: the completion was cut, so the experts of its last tokens may be missing.

    Raises:
        InferenceError: it has none.
        ValueError: they cannot be read, or do not belong to its tokens.
    """
    if (encoded := choice.get("routed_experts")) is None:
        raise InferenceError(
            "a server answered without the experts that it chose, which train.routing_replay=true needs: start it with "
            f"{RETURN_EXPERTS} (and prefix caching, on a GPU), or leave the knob out"
        )
    experts = unpack(b64decode(encoded, validate=True))
    missing = prompt + len(choice["token_ids"]) - 1 - len(experts)
    if missing < 0 or (missing and not cut):
        raise ValueError(
            f"the experts of {len(experts)} tokens for a prompt of {prompt} and a completion of "
            f"{len(choice['token_ids'])}: expected one less than both"
        )
    return pack(experts)
