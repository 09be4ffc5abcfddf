"""Where probes write, and how they say what they found."""

import contextlib
import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StorageError, UnavailableError
from storage.objects.store import Store


class Wrong(Exception):  # noqa: N818 - a finding, no error of ours
    """What a probe found is a problem; the message says what."""


class Untried(Exception):  # noqa: N818
    """A probe could not be tried, or does not apply; the message says why."""


class Place:
    """The folder `doctor/<nonce>/` of a store, and what was written there."""

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, f"doctor/{uuid.uuid4().hex[:12]}"
        self._keys: dict[str, None] = {}

    def key(self, name: str) -> str:
        """The key of `name`, which will be deleted at the end."""
        key = f"{self.folder}/{name}"
        self._keys[key] = None
        return key

    def written(self, name: str) -> tuple[str, bytes]:
        """Key and bytes of a new small object.

        Raises:
            Untried: it cannot be written, which the probe for that tells.
        """
        key, data = self.key(name), f"{name} {uuid.uuid4().hex}".encode()
        try:
            self.store.write(key, data)
        except (StorageError, OSError):
            raise Untried("needs an object, and none can be written") from None
        return key, data

    def clear(self) -> str:
        """Delete what was written; returns why something is left, or nothing."""
        try:
            for key in self._keys:
                self.store.delete(key)
        except (StorageError, OSError) as error:
            return f"{self.folder} is left behind: {why(error)}"
        if self.store.is_local:
            folder = Path(self.store.path(self.folder))
            with contextlib.suppress(OSError):  # never made, or another doctor is at work beside it
                folder.rmdir()
                folder.parent.rmdir()
        return ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to try.

    Args:
        name: what is asked.
        look: returns what it found, raises `Wrong` or `Untried`.
        consequence: what would go wrong in the pipeline.
        refused: whether a refusal is a problem (False), or only keeps this from being known (None).
    """

    name: str
    look: Callable[[Place], str]
    consequence: str
    refused: bool | None = False


def another(store: Store) -> Store:
    """A store of the same place with connections of its own."""
    twin = copy.copy(store)
    twin.positions = {}
    connect = getattr(store.backend, "another", None)
    twin.backend = connect() if connect else copy.copy(store.backend)
    return twin


def why(error: BaseException) -> str:
    """One line, with S3's name of the error."""
    told = error.__cause__ if isinstance(error, UnavailableError) and is_refusal(error) else error
    return " ".join(f"{code(error)} {told}".split())


def is_refusal(error: BaseException) -> bool:
    """Whether the place answered, and said no to this user."""
    return code(error) in ("AccessDenied", "AllAccessDisabled", "403")


def code(error: BaseException | None) -> str:
    """S3's name of an error; empty where it is not S3's."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
