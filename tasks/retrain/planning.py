"""Plan a night: what earlier nights leave to it, its configuration, and its evaluation sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs import Config, ConfigError, read_stored, up_to_date
from configs.evaluate import HELD_OUT
from configs.models import WHERE_MODELS_ARE
from configs.stored import lost, with_knobs
from configs.train import FROM_NEXT_UPDATE
from storage import layout
from storage.logs.nights import Night, Record
from storage.objects.store import Store
from storage.version_names import PolicyVersion, ProblemsVersion

REMOVED = "removed"
"""In `evaluation.fingerprints`: this set is no longer used."""
KEEPS = ("storage", "inference", "problems.exclusions", "run.accept_code", *WHERE_MODELS_ARE, *FROM_NEXT_UPDATE)
"""What a continued night takes from the present configuration: machine or storage may have changed since, and what a
stopped night needs to go on may be given."""


def remembered(
    records: Sequence[Record], champion: PolicyVersion | None
) -> tuple[Sequence[str], ProblemsVersion | None]:
    """Return the problem sets that are to be tried again, and the one that the present champion was trained on.

    After a rollback those are the problems that the champion's own night accepted, not those of later nights. If no
    night made the champion, all accepted problems count as its training problems.
    """
    if not records:
        return (), None
    last = records[-1]
    assert last.end
    accepted = last.end.accepted
    for record in records:
        if record.end and record.end.outcome == "promoted" and record.end.challenger == champion:
            accepted = record.end.accepted
        elif champion == layout.checkpoint(record.night.run, 0):
            accepted = record.night.accepted
    return [*([last.end.waiting] if last.end.waiting else []), *last.retried], accepted


def looks(records: Sequence[Record]) -> int:
    """Count the gates since the last promotion: those of the nights that ended with a decision, and the next one."""
    count = 1
    for end in (record.end for record in records if record.end):
        count = 1 if end.outcome == "promoted" else count + (end.decision is not None)
    return count


def night_config(
    config: Config, store: Store, number: int, champion: PolicyVersion | None, problems: str, sets: Mapping[str, str]
) -> dict[str, Any]:
    """Make the configuration of a night's run: it begins with `champion`, and all its problem sets are versions."""
    values = config.model_dump(mode="json")
    values["run"] |= {"name": night_run(config, number)}
    stored = {name: {"kind": "stored", "version": version} for name, version in sets.items()}
    values["problems"] |= {"train": {"kind": "stored", "version": problems}, "held_out": stored.pop(HELD_OUT)}
    values["evaluation"]["sets"] = stored
    if champion:
        values["policy"] |= {"path": store.uri(champion), "warm_start": None, "fork": None}
    return Config.model_validate(values).model_dump(mode="json")


def night_run(config: Config, number: int) -> str:
    """Return the name of a night's run."""
    return f"{config.run.name}-{number:04d}"


def continued(night: Night, config: Config) -> Config:
    """Return the configuration with which a night began, with the present values of `KEEPS`.

    Raises:
        ConfigError: an older program began the night, with settings that this one lacks; or a newer one, with knobs
            that this one does not know.
    """
    if former := lost(night.config):
        raise ConfigError(
            f"night {night.number} was begun by an older program, with settings that this one lacks "
            f"({'; '.join(former)}): end it with --give-up, and its problems wait for the next night"
        )
    kept = with_knobs(up_to_date(night.config), config.model_dump(mode="json"), KEEPS)
    return read_stored(kept, f"night {night.number}")


def check_sets(sets: Mapping[str, str], records: Sequence[Record], config: Config) -> None:
    """Check that no evaluation set has changed since the nights before, unless `evaluation.fingerprints` says so.

    Raises:
        ValueError: a set has changed or is missing, so the gate would no longer guard the same.
    """
    before = {name: version for record in records for name, version in record.night.sets.items()}
    pinned = before | config.evaluation.fingerprints
    pinned = {name: version for name, version in pinned.items() if version != REMOVED}
    changed = {name: sets.get(name, REMOVED) for name, version in pinned.items() if sets.get(name) != version}
    if changed:
        lines = "".join(f"\n  {name}: {pinned[name]} -> {version}" for name, version in changed.items())
        accept = ", ".join(f"{name}: {version}" for name, version in changed.items())
        raise ValueError(
            f"evaluation sets differ from those of the nights before, so champion and challengers cannot be compared "
            f"over time:{lines}\nRestore the old sets; or, if you want the change, set "
            f"evaluation.fingerprints='{{{accept}}}'"
        )
