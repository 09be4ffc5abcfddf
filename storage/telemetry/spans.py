"""Spans of what this process does, in OpenTelemetry's format; one trace for each iteration.

    iteration ─┬─ rollout ── group (each) ── generate
               ├─ score, train, evaluate
               └─ commit, put_object, head_object …   inside of each of these

They are exported by OTLP if the standard variable OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) names a receiver;
without it a span costs a few microseconds. A stream's groups, and those of workers in other processes, begin traces of
their own, since they belong to no iteration before they are finished: look for them by their attributes.

An error is named by its type only, because its message may quote what a policy wrote.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pkgutil import resolve_name

from opentelemetry import context, trace
from opentelemetry.trace import StatusCode
from prometheus_client import Histogram

from storage.telemetry.metrics import STAGES
from storage.version_names import Version

Value = str | int | float | bool
_tracer = trace.get_tracer("math-mt-ppo")


@contextmanager
def span(name: str, leaf: bool = False, /, **attributes: Value) -> Iterator[None]:
    """Trace a block, as part of what is traced around it; a `leaf` has no spans inside, and costs less."""
    current = _tracer.start_span(name, attributes=attributes)
    token = None if leaf else context.attach(trace.set_span_in_context(current))
    try:
        yield
    except BaseException as error:
        current.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        if token:
            context.detach(token)
        current.end()


@contextmanager
def stage(name: str, version: Version, iteration: int | None = None) -> Iterator[None]:
    """Trace and time the stage that makes a version of a run."""
    attributes: dict[str, Value] = {"run": version.run or "", "version": version}
    if iteration is not None:
        attributes["iteration"] = iteration
    with STAGES.labels(name).time(), span(name, **attributes):
        yield


@contextmanager
def request(name: str, seconds: Histogram, **attributes: Value) -> Iterator[None]:
    """Time a request and, inside of another span, trace it: one in the background would be a trace of its own."""
    inside = trace.get_current_span().get_span_context().is_valid
    with seconds.time(), span(name, True, **attributes) if inside else nullcontext():
        yield


@contextmanager
def iteration_span(run: str, iteration: int) -> Iterator[None]:
    """Trace an iteration, as the root of its trace; may enclose the `yield` of a generator.

    A generator that is dropped because its loop failed is closed in any context, so that only the span is ended then.
    """
    current = _tracer.start_span("iteration", context.Context(), attributes={"run": run, "iteration": iteration})
    token = context.attach(trace.set_span_in_context(current))
    try:
        yield
        context.detach(token)
    except GeneratorExit:
        current.set_status(StatusCode.ERROR, "the iteration was not finished")
        raise
    finally:
        current.end()


@contextmanager
def apart() -> Iterator[None]:
    """Let the spans of a block, and of what it starts, begin traces of their own."""
    token = context.attach(context.Context())
    try:
        yield
    finally:
        context.detach(token)


class _Seldom(logging.Filter):
    """Passes one record an hour: a receiver that is down would be told every few seconds."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        passes = record.created >= self._next
        self._next = record.created + 3600 if passes else self._next
        return passes


@cache
def export_spans() -> None:
    """Export the spans of this process from now on, if a receiver is configured; at its end those that are left.

    The standard variables say how: OTEL_EXPORTER_OTLP_PROTOCOL (`http/protobuf`, the default, or `grpc`), …_HEADERS,
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER. A receiver that is down loses spans and delays nothing but the process's
    end, by its time limit (OTEL_EXPORTER_OTLP_TIMEOUT, here 3 s).
    """
    endpoint, protocol = (
        os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{what}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{what}")
        for what in ("ENDPOINT", "PROTOCOL")
    )
    if not endpoint:
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", "math-mt-ppo")
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    transport = "grpc" if protocol == "grpc" else "http"
    exporter = resolve_name(f"opentelemetry.exporter.otlp.proto.{transport}.trace_exporter:OTLPSpanExporter")
    logging.getLogger(exporter.__module__).addFilter(_Seldom())
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    trace.set_tracer_provider(provider)
