"""Whether a place can be trusted with versions: tries out what the pipeline needs of it.

Everything written lies under `doctor/<nonce>/` and is deleted at the end.
"""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.maintenance.probes import folder, objects, races
from storage.maintenance.probes.place import Place, Probe, Untried, Wrong, why
from storage.objects.store import Store


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe said.

    Example: ProbeResult("race", True, "one of 16 writers won each of 5 races, and its bytes stand", "")
    """

    name: str
    ok: bool | None  # None: could not be tried
    found: str
    consequence: str  # what would go wrong in the pipeline; empty where nothing would


def examine(store: Store) -> list[ProbeResult]:
    """All checks of the place where `store` lies; one alone where it cannot be reached."""
    place = Place(store)
    if unreachable := objects.reach(place):
        return [
            ProbeResult(
                "reached", False, unreachable, "nothing works: this place cannot be reached, or knows no such user"
            )
        ]
    checks: list[ProbeResult] = []
    try:
        checks += [_check(probe, place) for probe in _probes(store)]
    finally:
        left = place.clear()
    return [*checks, ProbeResult("tidied up", False, left, "delete it by hand")] if left else checks


def _probes(store: Store) -> list[Probe]:
    if store.is_local:
        return [*objects.PROBES, *races.PROBES, *folder.PROBES]
    if store.root.startswith("s3://"):
        from storage.maintenance.probes import bucket

        return [*objects.PROBES, *races.PROBES, *bucket.PROBES]
    return [*objects.PROBES, *races.PROBES]


def _check(probe: Probe, place: Place) -> ProbeResult:
    try:
        return ProbeResult(probe.name, True, probe.look(place), "")
    except Wrong as wrong:
        return ProbeResult(probe.name, False, str(wrong), probe.consequence)
    except Untried as untried:
        return ProbeResult(probe.name, None, str(untried), probe.consequence)
    except (StorageError, OSError) as error:
        return ProbeResult(probe.name, probe.refused, why(error), probe.consequence)
