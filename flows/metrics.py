"""Print, plot and overlay the metrics of runs, while they run or afterwards.

python -m flows.metrics demo
python -m flows.metrics demo s3://bucket/prefix/runs/other --metric reward/mean policy/entropy --plot curves.png
"""

from pathlib import Path

from storage import errors, interrupts, layout
from storage.commands.program import Output, Parser, print_error
from storage.objects.store import Store
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row
from tasks.metrics.show import names_of, plot, shown, table_of


def main() -> int:
    """Run the command line; return the exit status."""
    parser = Parser(prog="python -m flows.metrics", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names of runs, or paths and URIs: s3://…/runs/NAME")
    parser.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
    parser.add_argument("--metric", nargs="+", metavar="NAME", help="default: the main ones; `--names` lists all")
    parser.add_argument("--names", action="store_true", help="list the names of all metrics")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot into this file (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print all rows as JSON")
    arguments = parser.parse_args()
    try:
        runs = {name: read_run(name, arguments.root) for name in arguments.runs}
        show(runs, arguments.metric, arguments.plot, only_names=arguments.names).print(as_json=arguments.json)
    except (ValueError, OSError) as error:
        print_error(error)
        return 1
    return 0


def read_run(target: str, root: str) -> list[Row]:
    """Read the rows of a run: a name below `root`, or the path or URI of its folder.

    Raises:
        StorageError: no stage of such a run is committed.
    """
    of_target, name = layout.find_run(target)
    store = Store(of_target or root)
    if not (rows := read_rows(store, name)):
        raise errors.StorageError(f"{store.uri(f'runs/{name}')} has no committed iteration: check the name and --root")
    return rows


def show(runs: dict[str, list[Row]], chosen: list[str] | None, picture: Path | None, *, only_names: bool) -> Output:
    """Make a table, and plot the runs over each other.

    Raises:
        ValueError: no run has a chosen metric.
    """
    rows = [row for of_run in runs.values() for row in of_run]
    known = names_of(runs)
    if only_names:
        return Output(known, known)
    if unknown := set(chosen or ()) - set(known):
        raise ValueError(f"no run has the metric {', '.join(sorted(unknown))}; --names lists those that there are")
    if not (names := chosen or shown(runs)):
        raise ValueError(f"none of the main metrics is stored for {', '.join(runs)}; --names lists those that are")
    if picture:
        plot(runs, names, picture)
    return Output(rows, [table_of(runs, names), *([f"plotted into {picture}"] if picture else [])])


if __name__ == "__main__":
    interrupts.run(main)
