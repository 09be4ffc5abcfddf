"""Reads completions from the answers of a vLLM server, with their logprobs, versions and experts.

With `--enable-return-routed-experts` each completion comes with the experts of all tokens that were read: base64 of a
file in NumPy's format .npy, [prompt + completion - 1, layers, experts per token]. The last token was not read. vLLM
demands its Model Runner V2 and prefix caching for it.
"""

from base64 import b64decode
from typing import Any

from configs.inference import RETURN_EXPERTS
from storage.records import pack_experts, unpack_experts
from storage.visible import visible, without_secrets
from tasks.inference.api import Completion, InferenceError

LARGEST_ERROR = 2**16
"""Bytes that are read of an error."""
LONGEST_SHOWN = 500
"""Characters of an answer in a message."""
_LARGEST_NUMBER = 3e38  # annotations are stored as float32


def shown(answer: object) -> str:
    """Return the beginning of an answer for a message."""
    text = answer[:LARGEST_ERROR].decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    return visible(without_secrets(text[:LARGEST_ERROR].replace("\\/", "/")), LONGEST_SHOWN)  # JSON may escape it


def number(value: Any) -> float:
    if isinstance(value, bool) or not abs(value) < _LARGEST_NUMBER:
        raise ValueError(f"{value!r:.80} is no number that can be stored")
    return float(value)


def completion_of(choice: dict[str, Any], limit: int, experts: bytes) -> Completion:
    ids, versions = choice["token_ids"], list[int]()
    spans = [(int(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"]]
    if not all(type(value) is int and 0 <= value < 2**31 for value in (*ids, *(length for _, length in spans))):
        raise TypeError("a token, or the length of a span, is no number of 31 bits")
    if not len(choice["logprobs"]["content"]) == sum(length for _, length in spans) == len(ids) <= limit:
        raise ValueError(f"{len(ids)} tokens, of {limit}, and other numbers of logprobs or versions")
    for version, length in spans:
        versions += [version] * length
    return Completion(
        token_ids=ids,
        logprobs=[number(entry["logprob"]) for entry in choice["logprobs"]["content"]],
        versions=versions,
        finish_reason=choice["finish_reason"],
        limit=len(choice["token_ids"]) if choice["finish_reason"] == "length" else limit,
        experts=experts,
    )


def experts_of(choice: dict[str, Any], prompt: int, *, cut: bool = False) -> bytes:
    """Return the experts of a choice of a server's answer, as `storage.records.pack_experts` packs them.

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
    experts = unpack_experts(b64decode(encoded, validate=True))
    missing = prompt + len(choice["token_ids"]) - 1 - len(experts)
    if missing < 0 or (missing and not cut):
        both = f"a prompt of {prompt} and a completion of {len(choice['token_ids'])}"
        raise ValueError(f"the experts of {len(experts)} tokens for {both}: expected one less than both")
    return pack_experts(experts)
