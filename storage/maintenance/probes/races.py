"""A probe of put-if-absent, on which all commits rely: of many writers of one object, exactly one succeeds."""

import threading
from concurrent.futures import ThreadPoolExecutor

from storage.errors import StorageError
from storage.maintenance.probes.place import Place, Probe, Untried, Wrong, another
from storage.objects.store import Store

_WRITERS = 16
_ROUNDS = 5
_PATIENCE_S = 120.0


def _one_winner(place: Place) -> str:
    stores = [another(place.store) for _ in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as connecting:  # connecting takes time, so it comes before the race
        list(connecting.map(lambda store: store.exists(place.key("race")), stores))
    _create_alone(stores[0], place)
    for number in range(_ROUNDS):
        _race(stores, place.key(f"race-{number}"))
    return f"one of {_WRITERS} writers won each of {_ROUNDS} races, and its bytes were stored"


def _create_alone(store: Store, place: Place) -> None:
    try:
        store.create(place.key("race-alone"), b"alone")
    except (StorageError, OSError):
        raise Untried("needs put-if-absent, and a create failed") from None


def _race(stores: list[Store], key: str) -> None:
    start = threading.Barrier(len(stores))

    def create(number: int) -> bool:
        start.wait(_PATIENCE_S)
        return stores[number].create(key, _data(number))

    with ThreadPoolExecutor(len(stores)) as writers:  # a reused executor may have too few threads
        winners = [number for number, won in enumerate(writers.map(create, range(len(stores)))) if won]
    if len(winners) != 1:
        raise Wrong(f"{len(stores)} writers created one object at once, and {len(winners)} of them succeeded")
    if (found := stores[0].read(key)) != _data(winners[0]):
        raise Wrong(f"writer {winners[0]} created an object successfully, but {found!r} is stored")


def _data(number: int) -> bytes:
    return f"writer {number}".encode()


PROBES = [
    Probe("race", _one_winner, "two writers could both think that they committed: do not use this place"),
]
