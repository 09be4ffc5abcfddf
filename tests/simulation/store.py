"""A store in memory that counts requests, and says how long an object store would take to answer them."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from storage.objects.interface import ObjectInfo
from storage.objects.store import Store

PUTS_A_SECOND, GETS_A_SECOND = 3_500, 5_500
"""What S3 allows for one prefix: creates and writes; reads and looks."""


class SimulatedBackend:
    """Objects in memory (`storage.objects.interface.Backend`); `seconds` says how long its requests would take.

    A prefix is a version, or the folder of a log. Beyond the limit of a prefix, requests wait for the next second.

    Args:
        latency_s: seconds that a request takes.
        time: returns the virtual time.
    """

    def __init__(self, latency_s: float, time: Callable[[], float]) -> None:
        self.latency_s, self._time = latency_s, time
        self.seconds = 0.0
        self.requests: Counter[str] = Counter()
        self.busiest: Counter[str] = Counter()
        """Most requests to one prefix within a second, by kind."""
        self._within: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))  # second, requests in it
        self._objects: dict[str, bytes] = {}

    def size(self, path: str) -> int:
        self._request("look", path)
        return len(self._get(path))

    def read(self, path: str) -> bytes:
        self._request("read", path)
        return self._get(path)

    def write(self, path: str, data: bytes) -> None:
        self._request("write", path)
        self._objects[path] = data

    def create(self, path: str, data: bytes) -> bool:
        self._request("create", path)
        return self._objects.setdefault(path, data) is data

    def upload(self, path: str, source: Path) -> None:
        self.write(path, source.read_bytes())

    def download(self, path: str, target: Path) -> str:
        data = self.read(path)
        target.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, path: str) -> None:
        self._request("delete", path)
        self._objects.pop(path, None)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        self._request("list", prefix)
        return (
            ObjectInfo(path, len(data), 0.0) for path, data in sorted(self._objects.items()) if path.startswith(prefix)
        )

    def uri(self, path: str) -> str:
        return f"simulated://{path}"

    def bytes_below(self, prefix: str) -> int:
        """Return the bytes of all objects whose path begins so, without a request."""
        return sum(len(data) for path, data in self._objects.items() if path.startswith(prefix))

    def upload_by_worker(self, path: str) -> float:
        """Count the requests with which a worker uploads a shard (it looks afterwards); return their seconds."""
        before = self.seconds
        self._request("upload", path)
        self._request("look", path)
        used, self.seconds = self.seconds - before, before
        return used

    def _get(self, path: str) -> bytes:
        try:
            return self._objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _request(self, kind: str, path: str) -> None:
        self.requests[kind] += 1
        prefix, limit = _prefix(path), GETS_A_SECOND if kind in ("look", "read", "list") else PUTS_A_SECOND
        now = int(self._time())
        second, count = self._within[kind, prefix]
        second, count = (second, count + 1) if second >= now else (now, 1)
        if count > limit:
            second, count = second + 1, 1
        self._within[kind, prefix] = second, count
        self.busiest[kind] = max(self.busiest[kind], count)
        self.seconds += self.latency_s + (second - now)


def _prefix(path: str) -> str:
    """Return the version, or the folder of the log, of an object."""
    return "/".join(path.split("/")[:-1][:6])


def simulated_store(latency_s: float, time: Callable[[], float]) -> tuple[Store, SimulatedBackend]:
    store = Store("memory://simulation")
    backend = store.backend = SimulatedBackend(latency_s, time)
    return store, backend
