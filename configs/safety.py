"""Checks of values that a user gives: they can be stored and read back, hold no secrets, and open nothing to others.

Every manifest stores the configuration, as YAML or JSON that everybody reads who reads the store.
"""

import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

import yaml

_DEEPEST = 50
"""Most lists, mappings and interpolations in each other."""
_SHOWN = 300
"""Most characters of a value that a message shows."""


def check_plain(values: dict[str, Any]) -> None:
    """Refuse values that could not be stored with a run, would be read back as something else, or hold credentials.

    >>> check_plain({"agent": {"args": {"limits": [1.0, math.inf]}}})
    Traceback (most recent call last):
    ValueError: agent.args.limits.1=inf is not a finite number: …

    Raises:
        ValueError: the message names the dotted key and the value.
    """
    for key, value in walk(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value!r} is not a finite number: runs are stored as JSON, which has no others")
        if isinstance(value, str) and _is_broken(value):
            raise ValueError(f"{key}={value!r} holds half a surrogate pair: use valid UTF-8 text")
        if isinstance(value, str) and re.match(r"[a-z][a-z0-9+.-]*://\S+$", value):  # an argument of an agent, too
            try:
                check_uri(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        if value is not None and not isinstance(value, bool | int | float | str | list | dict):
            kinds = "text, numbers, true, false, lists or mappings"
            raise ValueError(f"{key}={value!r}: {type(value).__name__} cannot be stored: use {kinds}")


def walk(values: dict[Any, Any] | list[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in `values`, from the outside to the inside.

    Raises:
        ValueError: a key is not text.
    """
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict) and (not isinstance(name, str) or _is_broken(name)):
            raise ValueError(f"{prefix}{name!r}: a key must be text: write it in quotes")
        yield f"{prefix}{name}", value
        if isinstance(value, dict | list):
            yield from walk(value, f"{prefix}{name}.")


def brief(value: Any) -> str:
    """Write `value` for a message, in a few lines at most."""
    text = repr(value)
    rest = len(text) - _SHOWN
    return f"{text[:_SHOWN]} … {rest:,} more characters" if rest > 0 else text


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


SECRET = re.compile(
    r"(^|[-_.])(sig|sas|pwd|pass|auth|secret|token|passw(or)?d|signature|credentials?|key)$|^x-(amz|goog)-|apikey|accesskeyid",
    re.IGNORECASE,
)
"""Matches names of URL parameters and environment variables that carry secrets, such as `access_token`,
`X-Amz-Signature` and `HF_TOKEN`, not `max_tokens`."""
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{(?:[^{}]|\{[^{}]*\})*?:")
"""Matches `${name:…}` in a text, unless it is escaped; `${run.name}` does not match."""

_OTHERS_ENTER = "it would open the server to others, or reveal its key: the server listens on a socket of your own user"
_RUNS_CODE = "it would run code, or load pickles, that no manifest names"
_SERVED = "the pipeline chooses the policy, its tokenizer and number format, see policy and inference"
_DEALT = "the pipeline deals out devices, and counts their memory: set "
_REFUSED = {
    _OTHERS_ENTER: "host port uds api-key hf-token grpc grpc-port root-path headless ssl-keyfile ssl-certfile "
    "ssl-ca-certs allowed-origins allowed-local-media-path data-parallel-address dpa master-addr otlp-traces-endpoint "
    "kv-events-config kv-transfer-config ec-transfer-config",
    _RUNS_CODE: "trust-remote-code code-revision hf-overrides load-format config-format model-loader-extra-config "
    "middleware worker-cls worker-extension-cls scheduler-cls logits-processors model-class-overrides log-config-file "
    "reasoning-parser-plugin tool-parser-plugin io-processor-plugin trust-request-chat-template",
    _SERVED: "model tokenizer revision tokenizer-revision served-model-name hf-config-path chat-template config "
    "download-dir dtype max-model-len generation-config logprobs-mode lora-modules enable-lora max-lora-rank "
    "lora-target-modules lora-dtype",
    f"{_DEALT}inference.tensor_parallel": "tensor-parallel-size tp",
    f"{_DEALT}inference.pipeline_parallel": "pipeline-parallel-size pp",
    f"{_DEALT}inference.replicas, each of which has all weights": "data-parallel-size dp",
}
"""Arguments of vLLM that `inference.extra_args` may not hold, by the reason of their refusal."""
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}


def check_uri(uri: str) -> str:
    """Return `uri`, a path or URI, if it holds no credentials.

    Raises:
        ValueError: it holds credentials; the message does not repeat them.
    """
    if any(_has_credentials(part) for part in uri.split("::")):  # zip://a::https://…
        raise ValueError("credentials in a URI would be stored in every manifest: put them in the environment instead")
    return uri


def _has_credentials(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
    except ValueError:  # such as an open bracket in a file pattern
        return "@" in uri.partition("://")[2].partition("/")[0] or _has_secret(uri.partition("?")[2])
    # In these schemes a user without a password may be a key.
    user_alone = "@" in parts.netloc and parts.scheme in ("http", "https", "ftp", "s3", "s3a", "gs", "gcs")
    with_password = ":" in parts.netloc.rpartition("@")[0]
    return bool(parts.scheme) and (with_password or user_alone or _has_secret(f"{parts.query}&{parts.fragment}"))


def _has_secret(query: str) -> bool:
    return any(SECRET.search(name) for name, _ in parse_qsl(query, keep_blank_values=True))


def check_depth(text: str) -> None:
    """Refuse YAML whose lists, mappings and interpolations lie too deep in each other.

    libyaml builds values recursively, without a limit: 100,000 brackets would end this process with a segmentation
    fault. Interpolations take time that grows faster than their depth.

    Raises:
        ValueError: it is too deep.
        yaml.YAMLError: it is no YAML.
    """
    depth = deepest = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        deepest = max(deepest, depth)
        if deepest > _DEEPEST:
            break
    if deepest > _DEEPEST or re.search(rf"(?:\$\{{[^${{}}]*){{{_DEEPEST + 1}}}", text):
        raise ValueError(f"more than {_DEEPEST} lists, mappings or ${{…}} lie in each other: check the brackets")


def check_interpolations(values: Any) -> None:
    """Refuse resolvers in the raw text of a configuration, such as `${oc.env:TOKEN}`.

    Raises:
        ValueError: the message names the key.
    """
    for key, text in walk(values):
        if isinstance(text, str) and _RESOLVER.search(text):
            raise ValueError(
                f"{key}={text!r}: its value, maybe a secret, would be stored in every manifest: write the value, give "
                "it as an override, or let your agent read the environment. ${section.knob} is allowed"
            )


def check_extra_args(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` for vLLM if they change neither the access to the server nor what it serves.

    Raises:
        ValueError: the message names the refused argument and the reason.
    """
    for argument, value in zip_longest(arguments, arguments[1:], fillvalue=""):
        name = argument.partition("=")[0].partition(".")[0].lstrip("-").replace("_", "-")
        # vLLM accepts abbreviations, so they are refused, too. A full name counts before what it abbreviates.
        refused = [full for full in _REASONS if full.startswith(name)] if argument.startswith("-") and name else []
        if refused:
            reason = _REASONS.get(name, _REASONS[refused[0]])
            raise ValueError(f"{argument.partition('=')[0]} is refused: {reason}")
        if name.startswith("distributed-exec") and "." in (argument.partition("=")[2] or value):
            raise ValueError(f"{name} with a custom class is refused: {_RUNS_CODE}")
    return list(arguments)


def open_regular(path: str | Path) -> BinaryIO:
    """Open the regular file at `path`, or at the target of its links, for reading.

    Raises:
        OSError: it does not exist, may not be read, or is a folder, a pipe or a device: reading might never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is a folder, a pipe or a device, not a regular file")
    return open(path, "rb")
