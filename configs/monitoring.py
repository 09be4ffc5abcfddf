"""The knobs of watching a flow while it runs. Spans are exported by OpenTelemetry's standard variables instead."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator

from configs.knobs import Knobs


def check_loopback(address: str) -> str:
    """Return `address` if it is one of this host's loopback interface, with a port.

    Raises:
        ValueError: it is not; other hosts could read what is served there.
    """
    host, _, port = address.rpartition(":")
    try:
        if ipaddress.IPv4Address(host).is_loopback and 0 < int(port) < 2**16:
            return address
    except ValueError:
        pass
    raise ValueError(
        f"{address!r} is not a loopback address with a port, such as 127.0.0.1:9464. Metrics are served to this host "
        "only, since everybody who reaches them reads them: let a Prometheus elsewhere scrape through an agent here"
    )


class Monitoring(Knobs):
    """What can be seen of a flow while it runs. No knob here changes a number."""

    prometheus: Annotated[str, AfterValidator(check_loopback)] | None = None
    """Address of the flow's metrics for Prometheus, such as 127.0.0.1:9464; empty: none are served. Every user of this
    host can read them: they hold counts, times and names of runs, but no texts and no secrets. Only loopback addresses
    are allowed. vLLM servers that the pipeline starts then count what they do, too."""
