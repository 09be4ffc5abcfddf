"""The commands of `python -m flows.retrain` that do not run the flow: each takes the configuration and returns text."""

from collections.abc import Sequence

from configs import Config
from configs.stored import lost
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.nights import End, Nights, now
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.aliases import Move
from storage.visible import printable
from tasks.evaluate.summary import rendered, table
from tasks.retrain.report import night_markdown, timeline


def explain(config: Config) -> str:
    """print why the last gate decided as it did"""
    store = _open_store(config)
    if not (records := Nights(store, config.run.name).read()):
        return f"retraining {config.run.name!r} has had no night yet in {config.storage.root}"
    shown = records[-1:] if records[-1].end else records[-2:]
    return printable("\n\n".join(night_markdown(store, config, record) for record in shown))


def nights(config: Config) -> str:
    """print all nights and moves of the champion"""
    if not (rows := timeline(_open_store(config), config)):
        return f"there is no champion yet: no alias {config.retrain.champion!r} in {config.storage.root}"
    return rendered(table(f"Retraining {config.run.name}", rows))


def roll_back(config: Config) -> str:
    """restore the champion before the present one, and print what that undoes"""
    store, alias = Store(config.storage.root), config.retrain.champion
    moves = aliases.history(store, alias)
    promotions = _promotions(moves)
    if len(promotions) < 2:
        raise StorageError(f"alias {alias!r} has no champion before the present one: there is nothing to restore")
    *_, before, present = promotions
    reason = f"roll back of move {present.number}"
    restored = aliases.move(store, alias, before.version, moves[-1].number, reason)  # fails if it was moved meanwhile
    return (
        f"{alias}: {present.version} -> {restored.version} (move {restored.number})\n"
        f"undone: move {present.number} by {present.by} at {present.at}: {present.reason}\n"
        "if a night made it, its problems are set aside: "
        "python -m flows.retrain … --retry NIGHT (its number is in --nights) tries them again\n"
        f"to undo this rollback: python -m storage --root {config.storage.root} alias rollback {alias}"
    )


def retry(config: Config, night: int) -> str:
    """let the problems of a rejected or rolled back night wait for the next night, even if they were set aside"""
    store, name = Store(config.storage.root), config.run.name
    with Lease(store, name, label="retry") as lease:
        log = Nights(store, name, lease)
        records = log.read()
        if not 1 <= night <= len(records):
            raise StorageError(f"retraining {name!r} has no night {night}; nights so far: {len(records)}")
        if records[-1].end is None:
            raise StorageError(f"night {records[-1].night.number} has not ended: wait for its end, then try again")
        retried = records[night - 1].night
        log.retry(retried.fresh)
    return f"the {retried.counts['new'] + retried.counts['waiting']} problems of night {night} wait for the next night"


def give_up(config: Config) -> str:
    """end a night that cannot finish; its problems wait for the next night"""
    store, name = Store(config.storage.root), config.run.name
    with Lease(store, name, label="give-up") as lease:
        log = Nights(store, name, lease)
        records = log.read()
        if not records or records[-1].end:
            return f"retraining {name!r} has no unfinished night: there is nothing to give up"
        night, standing = records[-1].night, aliases.current(store, config.retrain.champion)
        if standing and standing.version == records[-1].challenger and not lost(night.config):
            return f"night {night.number} has promoted its challenger already: run the flow once more to end it"
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
    """Open the store. An empty store is an error: a mistyped root would look like a retraining without nights."""
    store = Store(config.storage.root)
    catalog.check_not_empty(store)
    return store


def _promotions(moves: Sequence[Move]) -> list[Move]:
    """List the moves that led to the present champion, without those that were rolled back."""
    stack: list[Move] = []
    for move in moves:
        earlier = [index for index, promotion in enumerate(stack) if promotion.version == move.version]
        stack = stack[: earlier[0] + 1] if earlier else [*stack, move]
    return stack
