"""Spans of what this process does, in OpenTelemetry's format; one trace for each iteration.

    iteration ─┬─ rollout ── generate (each request to vLLM)
               ├─ score, train, evaluate
               └─ commit   inside of each of these

They are exported by OTLP if the standard variable OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) names a receiver;
without it a span costs a few microseconds. Requests of a stream, and of workers in other processes, are traces of their
own, since they belong to no iteration before their group is finished.

An error is named by its type only, because its message may quote what a policy wrote.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pkgutil import resolve_name

from opentelemetry import trace
from opentelemetry.trace import StatusCode

from storage import layout, version_names

_tracer = trace.get_tracer("math-mt-ppo")


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """Trace a block, as part of what is traced around it."""
    with _tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except BaseException as error:
            current.set_status(StatusCode.ERROR, type(error).__name__)
            raise


_STAGES = {"trajectories": "rollout", "annotations": "annotate", "scores": "score", "checkpoint": "train"}
"""The names of stages by the kinds of versions that they make; others are called as their kind."""


def making(version: version_names.Version) -> AbstractContextManager[None]:
    """Trace the stage that makes a version."""
    of_evaluation = layout.evaluated_policy(version) and version.kind != "annotations"
    name = "evaluate" if of_evaluation else _STAGES.get(version.kind, version.kind)
    return span(name, run=version.run or "", version=version)


@cache
def export_spans() -> None:
    """Export the spans of this process from now on, if a receiver is configured; at its end those that are left.

    The standard variables say how: OTEL_EXPORTER_OTLP_PROTOCOL (`http/protobuf`, the default, or `grpc`), …_HEADERS,
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER. A receiver that is down loses spans and delays nothing but the process's
    end, by its time limit (OTEL_EXPORTER_OTLP_TIMEOUT, here 3 s); the log says so once.
    """
    prefix = "OTEL_EXPORTER_OTLP"
    if not (os.environ.get(f"{prefix}_ENDPOINT") or os.environ.get(f"{prefix}_TRACES_ENDPOINT")):
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", "math-mt-ppo")
    os.environ.setdefault(f"{prefix}_TIMEOUT", "3")
    protocol = "grpc" if os.environ.get(f"{prefix}_PROTOCOL") == "grpc" else "http"
    exporter = resolve_name(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter:OTLPSpanExporter")()
    first = iter([True])
    logging.getLogger(type(exporter).__module__).addFilter(lambda _: next(first, False))
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
