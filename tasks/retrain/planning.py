"""What a night trains on, and with which configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs import Config, read_stored, up_to_date
from configs.schema import HELD_OUT
from storage import layout
from storage.logs.nights import Night, Record
from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion, ProblemsVersion
from tasks.problems.difference import not_superseded, replayed, union
from tasks.seeds import derive

REMOVED = "removed"
"""In `evaluation.fingerprints`: this set is no longer used."""
KEEPS = ("storage", "inference")
"""Sections that a night takes from the present configuration when it is continued: where it works may have changed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What earlier nights leave to the next one, as versions of problem sets."""

    waiting: Sequence[str]  # to be tried again
    accepted: ProblemsVersion | None  # what the champion was trained on
    retried: bool  # somebody asked for it: the night begins also where nothing is new


@dataclass(frozen=True, slots=True)
class Chosen:
    """The problems of a night: those never seen, those of nights rejected without harm, and some of the accepted."""

    new: list[Problem]
    waiting: list[Problem]
    replayed: list[Problem]

    @property
    def fresh(self) -> list[Problem]:
        return union(self.new, self.waiting)

    @property
    def problems(self) -> list[Problem]:
        return union(self.fresh, self.replayed)

    @property
    def counts(self) -> dict[str, int]:
        return {"new": len(self.new), "waiting": len(self.waiting), "replayed": len(self.replayed)}


def choose(
    new: Sequence[Problem], waiting: Sequence[Problem], accepted: Sequence[Problem], *, share: float, seed: int
) -> Chosen:
    """With so many replayed ones that they make up `share` of all, as far as there are enough.

    A prompt that came again has had its answer corrected: the older problem is left out.
    """
    waiting = not_superseded(waiting, new)
    fresh = union(new, waiting)
    return Chosen(list(new), waiting, replayed(fresh, share, not_superseded(accepted, fresh), seed))


def remembered(records: Sequence[Record], champion: PolicyVersion | None) -> Memory:
    """What waits, and what the standing champion has learnt from.

    After a roll-back that is what its own night had accepted, not what later ones did; a champion that no night made
    is taken for one that knows all that was accepted.
    """
    if not records:
        return Memory((), None, retried=False)
    last = records[-1]
    assert last.end
    accepted = last.end.accepted
    for record in records:
        if record.end and record.end.outcome == "promoted" and record.end.challenger == champion:
            accepted = record.end.accepted
        elif champion == layout.checkpoint(record.night.run, 0):
            accepted = record.night.accepted
    waiting = [*([last.end.waiting] if last.end.waiting else []), *last.retried]
    return Memory(waiting, accepted, retried=bool(last.retried))


def night_config(
    config: Config, store: Store, number: int, champion: PolicyVersion | None, problems: str, sets: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration of a night's run: it begins with `champion`, and all its problem sets are versions."""
    values = config.model_dump(mode="json")
    values["run"] |= {"name": night_run(config, number)}
    stored = {name: {"kind": "stored", "version": version} for name, version in sets.items()}
    values["problems"] |= {"train": {"kind": "stored", "version": problems}, "held_out": stored.pop(HELD_OUT)}
    values["evaluation"]["sets"] = stored
    if champion:
        values["policy"] = {"path": store.uri(champion)}
    return Config.model_validate(values).model_dump(mode="json")


def night_run(config: Config, number: int) -> str:
    """The name of a night's run."""
    return f"{config.run.name}-{number:04d}"


def night_seed(config: Config, number: int) -> int:
    """For what is chosen at random before the night's run begins."""
    return derive(config.run.seed, "night", number)


def continued(night: Night, config: Config) -> Config:
    """A night's configuration as it was begun, but for where it works and what is excluded, as it now is.

    Raises:
        ConfigError: a newer program began it, with knobs that this one does not know.
    """
    present, begun = config.model_dump(mode="json"), up_to_date(night.config)
    begun |= {section: present[section] for section in KEEPS}
    begun["problems"] |= {"exclusions": present["problems"]["exclusions"]}
    return read_stored(begun, f"night {night.number}")


def pinned_sets(records: Sequence[Record], config: Config) -> dict[str, str]:
    """By name the versions that evaluation sets must have: those of the nights before, unless the user names others."""
    before = {name: version for record in records for name, version in record.night.sets.items()}
    pinned = before | config.evaluation.fingerprints
    return {name: version for name, version in pinned.items() if version != REMOVED}


def check_sets(sets: Mapping[str, str], pinned: Mapping[str, str]) -> None:
    """Raises ValueError where a set is not what it was, or not there: then nothing would guard what it guarded."""
    changed = {name: sets.get(name, REMOVED) for name, version in pinned.items() if sets.get(name) != version}
    if changed:
        lines = "".join(f"\n  {name}: {pinned[name]} -> {version}" for name, version in changed.items())
        accept = ", ".join(f"{name}: {version}" for name, version in changed.items())
        raise ValueError(
            f"evaluation sets are not those of the nights before, so champion and challengers could not be compared "
            f"over time:{lines}\nGive the old ones back; or, where the change is meant, set "
            f"evaluation.fingerprints='{{{accept}}}'"
        )
