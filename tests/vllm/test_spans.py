"""Spans of a request: from vLLM's scheduler to an OpenTelemetry collector, and from the SDK's memory."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.caches import PATIENCE_SECONDS, eventually
from tests.collector import Collector, attributes, collecting
from tests.vllm.bench import prompt, start
from tests.vllm.fake_runner import TOKENS, continuation
from tests.vllm.plans import model_folder
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.spans import spans_of
from kvstrata.observe.tracing import Tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def test_each_step_of_a_request_is_a_span_of_its_clients_trace(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    init_none_hash(sha256)
    tokens = 4 * TOKENS + 3
    with start(model_folder(tmp_path), 400) as bench:
        engine = bench.engine(otlp_traces_endpoint=collector.address)
        began_ns = time.time_ns()
        for name in ("first", "second"):
            request = engine.add(name, prompt(1, tokens), 2)
            request.trace_headers = HEADERS
            engine.run()
            assert list(request.output_token_ids) == continuation(prompt(1, tokens), 2)
            bench.hears()
            engine.forget_device()
        eventually(lambda: len(collector.spans) >= 4, "not all spans have come")
    by_name = {(span.name, attributes(span)["kvstrata.request"]): span for span in collector.spans}
    assert by_name.keys() == {
        ("kvstrata.lookup", "first"),
        ("kvstrata.save", "first"),
        ("kvstrata.lookup", "second"),
        ("kvstrata.load", "second"),
    }
    for span in by_name.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert began_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert collector.services == {"kvstrata"}
    assert attributes(by_name["kvstrata.lookup", "first"])["kvstrata.tier"] == "none"
    found = attributes(by_name["kvstrata.lookup", "second"])
    assert (found["kvstrata.tier"], found["kvstrata.host_blocks"]) == ("host", 4)
    load = attributes(by_name["kvstrata.load", "second"])
    assert (load["kvstrata.tier"], load["kvstrata.blocks"]) == ("host", 4)
    assert load["kvstrata.failed"] is False
    assert attributes(by_name["kvstrata.save", "first"])["kvstrata.blocks"] == 4


def test_what_comes_up_from_below_has_a_span_of_its_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(
        "kvstrata.integration.vllm.spans.to_collector", lambda _: SimpleSpanProcessor(exporter)
    )
    init_none_hash(sha256)
    tokens = 4 * TOKENS + 3
    with start(model_folder(tmp_path), 8, shared=tmp_path / "shared") as bench:
        engine = bench.engine(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
        for seed in (1, 2, 3, 1):
            engine.serve(f"r{len(engine.requests)}", prompt(seed, tokens), 2)
            bench.hears()
            eventually(lambda: not any(t.waiting_blocks for t in bench.manager.stats().tiers), "")
            engine.forget_device()
    spans = {
        (span.name, (span.attributes or {})["kvstrata.request"]): span
        for span in exporter.get_finished_spans()
    }
    promotion, load = spans["kvstrata.promotion", "r3"], spans["kvstrata.load", "r3"]
    for span in (promotion, load):
        assert span.attributes is not None
        assert span.attributes["kvstrata.tier"] == "remote"
        assert span.parent is None  # nobody has begun a trace
    lookup = spans["kvstrata.lookup", "r3"]
    assert lookup.end_time == pytest.approx(promotion.start_time, abs=1e6)
    assert promotion.end_time is not None
    assert load.start_time is not None
    assert promotion.end_time <= load.start_time + 1e6
    assert ("kvstrata.promotion", "r0") not in spans


def test_off_unless_asked_for_and_then_nothing_of_it_is_imported() -> None:
    assert spans_of(load_config({})) is None
    program = (
        "import sys, kvstrata.observe.tracing\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    spans = spans_of(load_config({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}))
    assert spans is not None
    before = set(threading.enumerate())
    began = time.monotonic()
    for _ in range(5000):  # more than the queue holds
        spans._tracing.span("kvstrata.lookup", began, began, None, {"kvstrata.request": "r"})
    spans.close()
    assert time.monotonic() - began < PATIENCE_SECONDS
    for thread in set(threading.enumerate()) - before:  # it is tried again, at random intervals
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_missing_sdk_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ValueError, match=r"is not installed\n  hint: pip install 'kvstrata\[otel\]'"
    ):
        spans_of(load_config({"otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces"}))


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://h:4317", "http://", "https://user:secret@h/v1/traces"]
)
def test_what_is_no_collector_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint") as refused:
        load_config({"otlp_traces_endpoint": url})
    assert "secret@" not in str(refused.value)


def test_a_provider_of_the_application_is_left_alone() -> None:
    from opentelemetry import trace

    before = trace.get_tracer_provider()
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    tracing.span("kvstrata.lookup", 0.0, 1.0, None, {})
    tracing.close()
    assert trace.get_tracer_provider() is before
    assert [span.name for span in exporter.get_finished_spans()] == ["kvstrata.lookup"]
