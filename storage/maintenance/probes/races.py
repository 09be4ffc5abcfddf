"""The promise that everything rests on: of many who create an object at once, one does."""

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
    with ThreadPoolExecutor(_WRITERS) as connecting:  # takes time, and so comes before
        list(connecting.map(lambda store: store.exists(place.key("race")), stores))
    _alone(stores[0], place)
    for number in range(_ROUNDS):
        _race(stores, place.key(f"race-{number}"))
    return f"one of {_WRITERS} writers won each of {_ROUNDS} races, and its bytes stand"


def _alone(store: Store, place: Place) -> None:
    try:
        store.create(place.key("race-alone"), b"alone")
    except (StorageError, OSError):
        raise Untried("needs creates, and there are none") from None


def _race(stores: list[Store], key: str) -> None:
    start = threading.Barrier(len(stores))

    def create(number: int) -> bool:
        start.wait(_PATIENCE_S)
        return stores[number].create(key, _data(number))

    with ThreadPoolExecutor(len(stores)) as writers:  # a new one each time: an old one may have too few threads
        winners = [number for number, won in enumerate(writers.map(create, range(len(stores)))) if won]
    if len(winners) != 1:
        raise Wrong(f"{len(winners)} of {len(stores)} writers who created one object at once were told that they did")
    if (found := stores[0].read(key)) != _data(winners[0]):
        raise Wrong(f"writer {winners[0]} was told that it created an object, but {found!r} stands there")


def _data(number: int) -> bytes:
    return f"writer {number}".encode()


PROBES = [
    Probe("race", _one_winner, "two writers could both believe that they committed: do not use this place"),
]
