"""The ranks of another host than the flow's, for a trainer on several hosts.

    python -m tasks.train.ranks math-32b --host 1

Start it on each host but the first, with the flow's configuration, beside the flow. The ranks wait for those of the
other hosts, and end with the flow. If ranks are lost, or the flow fails, it starts its own again, up to
`trainer.max_restarts` times, and waits `trainer.startup_timeout_s` for the flow.
"""

import shutil
import time
from pathlib import Path

from configs import ConfigError, load
from storage import interrupts
from storage.commands.arguments import Parser, whole
from storage.commands.output import print_error
from tasks.train.ranks.host import HostRanks

_PAUSE_S = 10.0
"""Wait before a new start: the flow has ended its old ranks by then."""


def main() -> int:
    parser = Parser(prog="python -m tasks.train.ranks", description="Start the trainer's ranks on one more host.")
    parser.add_argument("config", help="name of a configuration, or a YAML file's path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.add_argument("--host", type=whole(1), required=True, help="number of this host; the flow's host is 0")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, arguments.overrides)
    except ConfigError as error:
        print_error(error)
        return 2
    if arguments.host >= config.trainer.hosts:
        last = config.trainer.hosts - 1
        print_error(ValueError(f"--host {arguments.host}: the last one is {last}, by trainer.hosts={last + 1}"))
        return 2
    logs = Path(config.storage.cache) / "logs" / config.run.name / "trainer" / f"host-{arguments.host}"
    shutil.rmtree(logs, ignore_errors=True)
    for attempt in range(config.trainer.max_restarts + 1):
        if attempt:
            time.sleep(_PAUSE_S)
        host = HostRanks(config, logs / f"attempt-{attempt + 1}", arguments.host)
        try:
            print(f"starting the ranks of host {arguments.host}; logs: {logs}", flush=True)
            host.start()
            if host.join():
                return 0
            print_error(RuntimeError(f"ranks were lost. torchrun's last lines:\n{host.log_tail()}"))
        finally:
            host.close()
    return 1


if __name__ == "__main__":
    interrupts.run(main)
