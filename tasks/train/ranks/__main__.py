"""The ranks of another host than the flow's, for a trainer on several hosts.

    python -m tasks.train.ranks math-32b --host 1

Start it on each host but the first, with the flow's configuration, beside the flow. The ranks wait for those of the
other hosts, up to `trainer.startup_timeout_s`, and end with the flow. If ranks are lost, or the flow fails, it starts
its own again, up to `trainer.max_restarts` times.
"""

import itertools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from configs import Config, ConfigError, load
from configs.cluster import Trainer
from storage import interrupts
from storage.commands.program import Parser, print_error, whole
from tasks.train.ranks.host import HostRanks, was_killed

_PAUSE_S = 10.0
"""Time before a new start, in which the flow usually ends its old ranks."""


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
    return _keep_running(config, arguments.host, logs)


def _keep_running(config: Config, index: int, logs: Path) -> int:
    """Start the ranks of the host with number `index` until they have ended well; return the exit status."""
    restarts = Restarts(config.trainer, time.monotonic())
    for attempt in itertools.count(1):
        host = HostRanks(config, logs / f"attempt-{attempt}", index)
        try:
            print(f"starting the ranks of host {index}; logs: {logs}", flush=True)
            host.start()
            if host.join():
                return 0
            print(f"the ranks have ended: {_reason(host)}", flush=True)
            if not restarts.allow(_had_met(host), time.monotonic()):
                break
        finally:
            host.close()
        time.sleep(_PAUSE_S)
    limit = f"trainer.max_restarts={config.trainer.max_restarts}"
    print_error(RuntimeError(f"ranks were lost, or waited in vain for the flow's, more often than {limit} allows"))
    return 1


@dataclass
class Restarts:
    """Decides whether the ranks of a host may start again.

    Args:
        knobs: the limits.
        since: the time in seconds since which the ranks of all hosts have not been together.
    """

    knobs: Trainer
    since: float
    used: int = 0

    def allow(self, had_met: bool, now: float) -> bool:
        """Return whether they may start again after an end.

        Each loss uses up one of `trainer.max_restarts`. Waiting for the flow uses up one only if it lasts too long;
        after a loss that is longer, because the flow may need `trainer.timeout_s` to notice it.

        Args:
            had_met: the ranks of all hosts were together.
            now: the time in seconds.
        """
        limit = self.knobs.startup_timeout_s + (self.knobs.timeout_s if self.used else 0)
        if had_met or now > self.since + limit:
            self.used, self.since = self.used + 1, now
        return self.used <= self.knobs.max_restarts


def _reason(host: HostRanks) -> str:
    if host.alive:
        return "a process was stopped for trainer.timeout_s"
    if (lost := host.first_to_end()) and was_killed(lost[1]):
        return f"the first one was rank {lost[0]}, with exit code {lost[1]}"
    first = next(iter(host.errors()), None)
    return f"rank {first['rank']}: {first['text']}" if first else f"torchrun's last lines:\n{host.log_tail()}"


def _had_met(host: HostRanks) -> bool:
    """Return whether the ranks of all hosts may have been together, so that one was lost in its work."""
    errors = host.errors()
    return not errors or any(error["met"] or not error["lost"] for error in errors)


if __name__ == "__main__":
    interrupts.run(main)
