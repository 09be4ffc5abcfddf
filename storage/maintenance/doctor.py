"""Tries out everything that the pipeline needs of a place, before versions are stored there.

It writes under `doctor/<nonce>/` only, and deletes everything at the end.
"""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.maintenance.probes import folder, objects, races
from storage.maintenance.probes.place import Place, Probe, Untried, Wrong, why
from storage.objects.store import Store


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe.

    Example: ProbeResult("race", True, "one of 16 writers won each of 5 races, and its bytes were stored", "")
    """

    name: str
    ok: bool | None  # None: could not be tried
    found: str
    consequence: str  # what would go wrong in the pipeline; empty if nothing would


def examine(store: Store) -> list[ProbeResult]:
    """Run all probes on the place of `store`; return a single result if the place cannot be reached."""
    place = Place(store)
    if unreachable := objects.reach(place):
        return [
            ProbeResult(
                "reached", False, unreachable, "nothing works: this place cannot be reached, or rejects this user"
            )
        ]
    results: list[ProbeResult] = []
    try:
        results += [_run(probe, place) for probe in _probes(store)]
    finally:
        left = place.clear()
    return [*results, ProbeResult("tidied up", False, left, "delete it by hand")] if left else results


def _probes(store: Store) -> list[Probe]:
    if store.is_local:
        return [*objects.PROBES, *races.PROBES, *folder.PROBES]
    if store.root.startswith("s3://"):
        from storage.maintenance.probes import bucket

        return [*objects.PROBES, *races.PROBES, *bucket.PROBES]
    return [*objects.PROBES, *races.PROBES]


def _run(probe: Probe, place: Place) -> ProbeResult:
    try:
        return ProbeResult(probe.name, True, probe.look(place), "")
    except Wrong as wrong:
        return ProbeResult(probe.name, False, str(wrong), probe.consequence)
    except Untried as untried:
        return ProbeResult(probe.name, None, str(untried), probe.consequence)
    except (StorageError, OSError) as error:
        return ProbeResult(probe.name, probe.refused, why(error), probe.consequence)
