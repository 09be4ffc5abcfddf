"""Small JSON objects that say themselves whether they are whole: their last field is a digest of the rest."""

import hashlib
import json
import re
from typing import Any

from pydantic import ValidationError

from storage.errors import DamagedError

_DIGEST = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
_SHOWN = 3
"""Fields that a message names."""


def seal(values: dict[str, Any]) -> bytes:
    """`values` as JSON with their digest.

    >>> print(seal({"a": 1}).decode()[:20])
    {
     "a": 1,
     "digest
    """
    assert values, "an empty object has no end to seal"
    body = json.dumps(values, indent=1, ensure_ascii=False).encode()
    return body.removesuffix(b"\n}") + f',\n "digest": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The values, without the digest.

    Raises:
        StorageError: not what `seal` wrote; `where` is named.
    """
    match = _DIGEST.search(data)
    if not match:
        raise DamagedError(f"{where} does not end with its digest: it is damaged, or not ours")
    body = data[: match.start()] + b"\n}"
    if hashlib.sha256(body).hexdigest() != match[1].decode():
        raise DamagedError(f"{where} does not match its own digest: it is damaged")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not JSON, though its digest is right: it is damaged, or not ours") from error
    assert isinstance(values, dict)
    return values


def newer(error: Exception) -> str:
    """The fields and kinds of a record for which it was refused, though a newer program may know them; or nothing."""
    if not isinstance(error, ValidationError):
        return ""
    details = [each for each in error.errors() if each["type"] in ("extra_forbidden", "literal_error")]
    return ", ".join(f"{'.'.join(map(str, each['loc']))}={each['input']!r}" for each in details)


def field_errors(error: ValidationError) -> str:
    """Name the fields of a record that are wrong, and why, on one line; the first few of them.

    Example: "kind: Input should be a valid string; version: Field required"
    """
    details = error.errors(include_url=False, include_input=False)
    named = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in details[:_SHOWN]]
    return "; ".join(named) + (f"; and {len(details) - _SHOWN} more" if len(details) > _SHOWN else "")
