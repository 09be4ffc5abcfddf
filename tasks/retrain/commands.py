"""What `python -m flows.retrain` does without running the flow: each takes the configuration and returns a text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs import Config
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.nights import End, Nights, Record, now
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.aliases import Move
from tasks.evaluate.summary import comparison_rows, rendered, table
from tasks.retrain.night_report import check_rows
from tasks.retrain.timeline import read_timeline, timeline_rows, write_timeline

if TYPE_CHECKING:
    from rich.table import Table


def explain(config: Config) -> str:
    """print why the last gate decided as it did"""
    store = _open_store(config)
    records = Nights(store, config.run.name).read()
    if not records:
        return f"retraining {config.run.name!r} has had no night yet in {config.storage.root}"
    return "\n".join(_explained(store, config, record) for record in records[-1:] + _last_ended(records))


def nights(config: Config) -> str:
    """print all nights and moves of the champion"""
    events = read_timeline(_open_store(config), config)
    if not events:
        return f"there is no champion yet: no alias {config.retrain.champion!r} in {config.storage.root}"
    return rendered(table(f"Retraining {config.run.name}", timeline_rows(events)))


def roll_back(config: Config) -> str:
    """put the champion before this one back, and say what that undoes"""
    store, alias = Store.of(config.storage), config.retrain.champion
    moves = aliases.history(store, alias)
    standing = _standing(moves)
    if len(standing) < 2:
        raise StorageError(f"alias {alias!r} has no champion before the present one: nothing to go back to")
    present, before = standing[-1], standing[-2]
    undone = _undone(store, config, present)
    reason = f"roll back of move {present.number}"
    done = aliases.move(store, alias, before.version, moves[-1].number, reason)  # unless somebody moved it just now
    return "\n".join(
        [
            f"{alias}: {present.version} -> {done.version} (move {done.number})",
            f"undone: move {present.number} by {present.by} at {present.at}: {present.reason}",
            *undone,
            f"to take this back: python -m storage --root {config.storage.root} alias rollback {alias}",
            *_redrawn(store, config),
        ]
    )


def retry(config: Config, night: int) -> str:
    """let the problems of a night that was rejected or rolled back wait for the next one, though they were set aside"""
    store, name = Store.of(config.storage), config.run.name
    with Lease(store, name, config.run.lease_s, label="retry") as lease:
        log = Nights(store, name, lease)
        records = log.read()
        if not 1 <= night <= len(records):
            raise StorageError(f"retraining {name!r} has had {len(records)} nights, but no night {night}")
        if records[-1].end is None:
            raise StorageError(f"night {records[-1].night.number} has not ended: let it, and ask again")
        found = records[night - 1].night
        log.retry(found.fresh)
    return f"the {found.counts['new'] + found.counts['waiting']} problems of night {night} wait for the next night"


def give_up(config: Config) -> str:
    """end a night that cannot come to its end, so that the next one begins anew; its problems wait for that"""
    store, name = Store.of(config.storage), config.run.name
    with Lease(store, name, config.run.lease_s, label="give-up") as lease:
        log = Nights(store, name, lease)
        records = log.read()
        if not records or records[-1].end:
            return f"no night of retraining {name!r} is unfinished: there is nothing to give up"
        night, standing = records[-1].night, aliases.current(store, config.retrain.champion)
        if standing and standing.version == records[-1].challenger:
            return f"night {night.number} has made the champion already: run the flow once more, and it ends"
        end = End(
            number=night.number,
            outcome="given up",
            challenger=records[-1].challenger,
            decision=None,
            move=standing.number if standing else None,
            accepted=night.accepted,
            waiting=night.fresh,
            at=now(),
        )
        log.end(end)
    return f"night {night.number} is given up; its {night.counts['new']} new problems wait for the next night"


def _open_store(config: Config) -> Store:
    """Return the store. An empty one is an error: a mistyped root would look like a retraining without nights."""
    store = Store.of(config.storage)
    catalog.check_not_empty(store)
    return store


def _explained(store: Store, config: Config, record: Record) -> str:
    night, end = record.night, record.end
    if end is None:
        return f"night {night.number} began {night.at} and has not ended: the next flow run goes on with it\n"
    head = f"night {night.number}: {end.outcome} (began {night.at}, ended {end.at})"
    if end.decision is None:
        return head
    decision = manifests.read(store, end.decision).metrics
    parts: list[Table | str] = [
        head,
        f"champion   {decision['champion']}",
        f"challenger {decision['challenger']}",
        table("The gate", check_rows(decision)),
        *(table(name, comparison_rows(found)) for name, found in decision["comparisons"].items()),
        f"the record: python -m storage --root {config.storage.root} show {end.decision}",
    ]
    return rendered(*parts)


def _last_ended(records: Sequence[Record]) -> list[Record]:
    """The last night with an end, where the newest has none."""
    return [] if records[-1].end else [record for record in records if record.end][-1:]


def _standing(moves: Sequence[Move]) -> list[Move]:
    """The champions of which each came after the one before it; what was gone back from is left out."""
    stack: list[Move] = []
    for move in moves:
        known = [place for place, each in enumerate(stack) if each.version == move.version]
        stack = stack[: known[0] + 1] if known else [*stack, move]
    return stack


def _undone(store: Store, config: Config, present: Move) -> list[str]:
    """The gate's reasons for what is being undone, where a night made it, and what becomes of its problems."""
    records = Nights(store, config.run.name).read()
    nights = [each for each in records if each.end and each.end.decision and each.end.challenger == present.version]
    if not nights or not nights[-1].end or not nights[-1].end.decision:
        return []
    number, decision = nights[-1].night.number, manifests.read(store, nights[-1].end.decision).metrics
    better = next(check["says"] for check in decision["checks"] if check["kind"] == "better")
    return [
        f"it was promoted by night {number} for: {better}",
        f"the problems of night {number} are set aside: python -m flows.retrain … --retry {number} tries them again",
    ]


def _redrawn(store: Store, config: Config) -> list[str]:
    """The picture of the champions, drawn anew; what is wrong with it is told, since the roll-back stands."""
    try:
        write_timeline(store, config)
    except (StorageError, OSError) as error:
        return [f"the picture was not drawn anew: {error}"]
    return []
