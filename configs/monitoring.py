"""The knobs of watching a flow while it runs. Spans are exported by OpenTelemetry's standard variables instead."""

from typing import Annotated

from pydantic import Field

from configs.knobs import Knobs


class Monitoring(Knobs):
    """Numbers that a running flow shows. No knob here changes a result."""

    prometheus: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of 127.0.0.1 at which the flow serves its metrics for Prometheus, such as 9464; empty: none are served.
    Every user of this host can read them: they hold counts, times and names of runs, but no texts and no secrets. vLLM
    servers that the pipeline starts then count what they do, too."""
