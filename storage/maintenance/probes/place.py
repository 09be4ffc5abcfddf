"""The place that probes examine: a folder to write to, and the form of their results."""

import contextlib
import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StorageError, UnavailableError
from storage.objects.store import Store


class Wrong(Exception):  # noqa: N818 - a finding, not an error of this program
    """A probe found a problem, which the message describes."""


class Untried(Exception):  # noqa: N818
    """A probe could not run, or does not apply; the message says why."""


class Place:
    """The folder `doctor/<nonce>/` of a store, with the keys of all objects written there."""

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, f"doctor/{uuid.uuid4().hex[:12]}"
        self._keys: dict[str, None] = {}

    def key(self, name: str) -> str:
        """Return the key of `name` and remember it: `clear` deletes its object."""
        key = f"{self.folder}/{name}"
        self._keys[key] = None
        return key

    def written(self, name: str) -> tuple[str, bytes]:
        """Write a new small object; return its key and bytes.

        Raises:
            Untried: it cannot be written. Another probe reports that.
        """
        key, data = self.key(name), f"{name} {uuid.uuid4().hex}".encode()
        try:
            self.store.write(key, data)
        except (StorageError, OSError):
            raise Untried("needs an object, but none can be written") from None
        return key, data

    def clear(self) -> str:
        """Delete what was written; return why something is left, or an empty text."""
        try:
            for key in self._keys:
                self.store.delete(key)
        except (StorageError, OSError) as error:
            return f"{self.folder} is left behind: {why(error)}"
        if self.store.is_local:
            folder = Path(self.store.path(self.folder))
            with contextlib.suppress(OSError):  # it was never made, or another doctor is running
                folder.rmdir()
                folder.parent.rmdir()
        return ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A check of one property of a place.

    Args:
        name: the property.
        look: the check; returns what it found, or raises `Wrong` or `Untried`.
        consequence: what would go wrong in the pipeline without the property.
        refused: `ok` of the result if the place refuses: False, a problem; None, the property stays unknown.
    """

    name: str
    look: Callable[[Place], str]
    consequence: str
    refused: bool | None = False


def another(store: Store) -> Store:
    """Return a store of the same place with its own connections."""
    twin = copy.copy(store)
    twin.positions = {}
    connect = getattr(store.backend, "another", None)
    twin.backend = connect() if connect else copy.copy(store.backend)
    return twin


def why(error: BaseException) -> str:
    """Describe an error on one line, with S3's code."""
    cause = error.__cause__ if isinstance(error, UnavailableError) and is_refusal(error) else error
    return " ".join(f"{code(error)} {cause}".split())


def is_refusal(error: BaseException) -> bool:
    """Return whether the place answered and refused this user."""
    return code(error) in ("AccessDenied", "AllAccessDisabled", "403")


def code(error: BaseException | None) -> str:
    """Return S3's code of an error; empty if the error is not from S3."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
