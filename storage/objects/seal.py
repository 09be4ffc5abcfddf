"""Small JSON objects that prove that they are whole: their last field is a digest of the rest."""

import hashlib
import json
import re
from typing import Any

from pydantic import ValidationError

from storage.errors import DamagedError

_DIGEST = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')


def seal(values: dict[str, Any]) -> bytes:
    """Return `values` as JSON with their digest as the last field.

    >>> print(seal({"a": 1}).decode()[:20])
    {
     "a": 1,
     "digest
    """
    assert values, "an empty object has no end to seal"
    body = json.dumps(values, indent=1, ensure_ascii=False).encode()
    return body.removesuffix(b"\n}") + f',\n "digest": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Check the digest in `data` and return the values without it.

    Raises:
        DamagedError: `data` is not what `seal` wrote; the message names `where`.
    """
    match = _DIGEST.search(data)
    if not match:
        raise DamagedError(f"{where} does not end with its digest: it is damaged, or another program wrote it")
    body = data[: match.start()] + b"\n}"
    if hashlib.sha256(body).hexdigest() != match[1].decode():
        raise DamagedError(f"{where} does not match its own digest: it is damaged")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{where} is not JSON, though its digest is right: it is damaged, or another program wrote it"
        ) from error
    assert isinstance(values, dict)
    return values


def newer(error: Exception) -> str:
    """Name the unknown fields and values because of which a record was refused, and which a newer program may know.

    Return an empty text if there are none.
    """
    if not isinstance(error, ValidationError):
        return ""
    details = [detail for detail in error.errors() if detail["type"] in ("extra_forbidden", "literal_error")]
    return ", ".join(f"{'.'.join(map(str, detail['loc']))}={detail['input']!r}" for detail in details)
