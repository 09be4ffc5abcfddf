"""`compare`: two data sets on the same problems, such as the evaluations of two policies or of two programs."""

import argparse
from pathlib import Path

from storage.commands.program import Output
from storage.objects.store import Store
from storage.version_names import ScoresVersion, TrajectoriesVersion, version_of
from tasks.evaluate.outcomes import Outcome, compare, read_outcomes
from tasks.evaluate.summary import comparison_rows, table
from tasks.tables.sets import TargetError, select


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `compare`."""
    for name in ("before", "after"):
        parser.add_argument(name, help="a version of trajectories or of an evaluation, or a run with one data set")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Compare the newest scores of two data sets, paired by problem.

    Raises:
        ValueError: a target is not one data set with scores, or the problems are not the same.
    """
    before, after = (_outcomes(store, each, Path(arguments.cache)) for each in (arguments.before, arguments.after))
    compared = compare(before, after)
    title = f"{arguments.after} against {arguments.before}, {compared['problems']:,} problems"
    return Output(compared, [table(title, comparison_rows(compared))])


def _outcomes(store: Store, target: str, cache: Path) -> list[Outcome]:
    data_sets = select(store, [target])
    if len(data_sets) != 1 or not data_sets[0].scores:
        versions = ", ".join(each.version for each in data_sets if each.scores) or "none with scores"
        raise TargetError(f"{target} is not one data set with scores: name one of its versions, {versions}")
    (found,) = data_sets
    version = version_of(found.version)
    assert isinstance(version, TrajectoriesVersion)
    return read_outcomes(store, version, ScoresVersion(found.scores[-1]), cache)
