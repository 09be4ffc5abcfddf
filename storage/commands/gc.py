"""`gc`: shows, and with --delete deletes, the data of versions that are not needed and leftovers."""

import argparse
from dataclasses import asdict

from storage.commands.arguments import positive_or_zero, whole
from storage.commands.output import Output, print_progress, size, table
from storage.maintenance import gc as garbage
from storage.maintenance.retention import KINDS, Rules
from storage.objects.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rules = Rules()
    parser.add_argument("--delete", action="store_true", help="delete; without it only show what would be deleted")
    parser.add_argument(
        "--keep-last",
        type=whole(1),
        default=rules.keep_last,
        metavar="N",
        help=f"keep so many newest versions of each kind of a run; default {rules.keep_last}",
    )
    parser.add_argument(
        "--keep-every",
        type=whole(0),
        default=0,
        metavar="M",
        help="also keep versions 0, M, 2M …; default: only 0",
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=KINDS,
        help="kind of versions to collect; may be repeated; default: checkpoint",
    )
    parser.add_argument(
        "--older-than-hours",
        type=positive_or_zero,
        default=rules.older_than_s / 3600,
        metavar="H",
        help="collect leftovers of killed attempts and unfinished uploads older than this; default 24",
    )
    parser.add_argument(
        "--shallow", action="store_true", help="keep only the version of an alias, not everything it was made from"
    )


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Plan or delete; show one line for each run."""
    rules = Rules(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        kinds=tuple(arguments.kind or Rules().kinds),
        older_than_s=arguments.older_than_hours * 3600,
        with_ancestors=not arguments.shallow,
    )
    plans = garbage.collect(store, rules, print_progress) if arguments.delete else garbage.plan(store, rules)
    data = [_data(plan) for plan in plans]
    if not plans:
        return Output(data, ["nothing to collect"])
    rows = [
        (
            plan.run or "(no run)",
            len(plan.versions),
            len(plan.leftovers),
            len(plan.uploads),
            size(plan.bytes),
            plan.held_by,
        )
        for plan in plans
    ]
    columns = ["run", "versions", "leftover objects", "unfinished uploads", "size", "left alone: written by"]
    hint = "deleted" if arguments.delete else "nothing was deleted: --delete does it"
    return Output(data, [table(columns, rows), *_names(plans, deleted=arguments.delete), hint])


def _names(plans: list[garbage.Plan], *, deleted: bool) -> list[str]:
    """List the versions of the plans, unless progress has already listed the deleted ones."""
    return [] if deleted else [f"  {manifest.version}" for plan in plans for manifest in plan.versions]


def _data(plan: garbage.Plan) -> dict[str, object]:
    return {
        "run": plan.run,
        "held_by": plan.held_by,
        "versions": [manifest.version for manifest in plan.versions],
        "leftovers": [item.path for item in plan.leftovers],
        "uploads": [asdict(upload) for upload in plan.uploads],
        "bytes": plan.bytes,
    }
