"""Give a tracker what a run has committed: TensorBoard, Weights & Biases, MLflow, trackio, or one's own.

python -m flows.track demo --to tensorboard
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 python -m flows.track s3://bucket/prefix/runs/demo --to mlflow
"""

import logging
from pathlib import Path

from storage import interrupts, layout
from storage.commands.program import Parser, print_error
from storage.errors import StorageError
from storage.objects.store import Store
from storage.visible import print_clean_logs
from tasks.tracking import SINKS
from tasks.tracking.follow import check_trackers, feed, follow


def main() -> int:
    """Run the command line; return the exit status."""
    parser = Parser(prog="python -m flows.track", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path or URI of its folder: s3://…/runs/NAME")
    known = f"{', '.join(SINKS.names)}, or package.module:Class"
    parser.add_argument("--to", required=True, metavar="TRACKER", help=known)
    parser.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
    parser.add_argument("--cache", default="./var/cache", help="folder for files of the tracker; default ./var/cache")
    parser.add_argument("--until-closed", type=int, metavar="FD", help="go on until this descriptor ends (for flows)")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    print_clean_logs()
    root, run = layout.find_run(arguments.run)
    store = Store(root or arguments.root)
    try:
        check_trackers([arguments.to])
        if arguments.until_closed is not None:
            follow(store, run, arguments.to, Path(arguments.cache), arguments.until_closed)
            return 0
        if not (count := feed(store, run, arguments.to, Path(arguments.cache))):
            raise StorageError(f"{store.uri(f'runs/{run}')} has no committed iteration: check the name and --root")
    except Exception as error:  # noqa: BLE001 - a tracker may raise anything; it is printed
        print_error(error)
        return 1
    print(f"{arguments.to} got {count} points of {store.uri(f'runs/{run}')}")
    return 0


if __name__ == "__main__":
    interrupts.run(main)
