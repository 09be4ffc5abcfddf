"""Show a run on a live page: where it is, curves, alarms, newest transcripts, time, tokens and cost. It only reads.

python -m flows.watch demo
python -m flows.watch s3://bucket/prefix/runs/demo --per-hour 2.5
"""

import socket

from storage import interrupts, layout
from storage.commands.program import Parser, positive, print_error
from storage.objects.store import Store

_PORT = 8601


def main() -> int:
    """Run the command line; return the exit status."""
    parser = Parser(prog="python -m flows.watch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path or URI of its folder: s3://…/runs/NAME")
    parser.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
    parser.add_argument("--per-hour", type=positive, metavar="PRICE", help="of an hour; default: no cost is shown")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: any free port")
    arguments = parser.parse_args()
    root, run = layout.find_run(arguments.run)
    try:
        from tasks.audit.reader.serving import ADDRESS, serve
        from tasks.watch.page import State, create_app

        store = Store(root or arguments.root)
        State(store, run)  # an error belongs on the terminal, not on the page
        with socket.create_server((ADDRESS, arguments.port)) as listener:
            serve(create_app(store, run, arguments.per_hour), listener, "The page")
    except (ValueError, OSError) as error:
        print_error(error)
        return 1
    return 0


if __name__ == "__main__":
    interrupts.run(main)
