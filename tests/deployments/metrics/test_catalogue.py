"""What ``/metrics`` and Ray's metrics port say after real requests, and who reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from deployments.http.metrics import HttpMetrics, MeasuredRequests
from deployments.metrics.catalogue import METRICS
from deployments.metrics.poll import KEEP_S, ReportBook
from deployments.metrics.ray_metrics import ray_name
from deployments.metrics.samples import (
    Histogram,
    HistogramValue,
    Observations,
    Report,
    Sample,
    histogram_of,
)
from deployments.metrics.statistics_line import statistics_line
from deployments.metrics.text import render
from deployments.replica.report import draft_samples
from deployments.replica.request_metrics import RequestMetrics
from hdserve.core import (
    DraftCounts,
    FinishReason,
    SamplingParams,
    Sequence,
    Source,
    StepOutput,
)
from hdserve.engine.stats import count_draft
from hdserve.errors import GrammarsOverloaded, InvalidRequest, Overloaded
from hdserve.tree import Acceptance, DraftTree
from tests.clusters import connected_cluster
from tests.k8s.monitoring import metric_of, series_named
from tests.serving import ServedApplication

MODEL = "hdserve-mini"
NUM_REQUESTS = 6
WAIT_S = 60.0
SUFFIXES = {"counter": "total", "histogram": "count"}


class Scrape:
    """A parsed answer of ``/metrics``, or of Ray's port."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def values(self, sample: str, **labels: str) -> list[float]:
        return [
            item.value
            for family in self.families.values()
            for item in family.samples
            if item.name == sample and labels.items() <= item.labels.items()
        ]

    def total(self, sample: str, **labels: str) -> float:
        return sum(self.values(sample, **labels))


def test_rendered_text_is_what_prometheus_reads() -> None:
    """Counters, gauges and histograms survive the text format, labels and owner included."""
    histogram = Histogram("vllm:e2e_request_latency_seconds")
    for value in (0.001, 0.0011, 3.0, 5000.0):
        histogram.observe(value)
    report = Report(
        "a",
        (
            Sample("vllm:prompt_tokens", 7),
            Sample("hdserve_database_bytes", 12, ('we"ird\n',)),
            histogram.sample(),
        ),
    )
    scrape = Scrape(render({"m": [report, Report("b", report.samples[:1])]}).decode())
    assert scrape.values("vllm:prompt_tokens_total", model_name="m") == [7, 7]
    assert scrape.values("vllm:prompt_tokens_total", engine="b") == [7]
    assert scrape.values("hdserve_database_bytes", database='we"ird\n') == [12]
    name = "vllm:e2e_request_latency_seconds"
    assert scrape.values(f"{name}_bucket", le="0.001") == [1]
    assert scrape.values(f"{name}_bucket", le="0.0025") == [2]
    assert scrape.values(f"{name}_bucket", le="1000.0") == [3]
    assert scrape.values(f"{name}_bucket", le="+Inf") == [4]
    assert scrape.values(f"{name}_count") == [4]
    assert scrape.values(f"{name}_sum") == [pytest.approx(5003.0021)]


class _Broken:
    """An application that fails, after it has begun to answer or before."""

    def __init__(self, begins: bool) -> None:
        self._begins = begins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._begins:
            await send({"type": "http.response.start", "status": 200})
        raise ValueError("broken on purpose")


@pytest.mark.parametrize(("begins", "status"), [(False, "500"), (True, "200")])
def test_an_error_that_nobody_handles_is_counted(begins: bool, status: str) -> None:
    """What it is answered with is sent outside of the middleware that counts."""
    metrics = HttpMetrics()

    async def send(_: Any) -> None:
        pass

    with pytest.raises(ValueError, match="broken on purpose"):
        asyncio.run(MeasuredRequests(_Broken(begins), metrics)({"type": "http"}, send, send))
    counts = [item for item in metrics.samples() if item.name == "hdserve_http_requests"]
    assert counts == [Sample("hdserve_http_requests", 1, ("unknown", status))]


def test_whole_numbers_in_a_histogram() -> None:
    """By how often each was observed."""
    num_by_value = [3, 0, 5, 1, 0, 2, *[0] * 294, 4]
    sample = histogram_of("hdserve_step_draft_tokens", num_by_value)
    histogram = Histogram("hdserve_step_draft_tokens")
    for value, number in enumerate(num_by_value):
        for _ in range(number):
            histogram.observe(value)
    assert sample == histogram.sample()
    assert isinstance(sample.value, HistogramValue)
    assert (sample.value.counts[0], sample.value.counts[-1]) == (3, 4)


def test_positions_are_bounded() -> None:
    """The last is of all that is deeper, so that they sum up to what was accepted."""
    drafts = DraftCounts(num_drafts_by_accepted=[2, 3, *[0] * 15, 4, *[0] * 12, 1])

    def positions(most_accepted: int) -> list[float | HistogramValue]:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        found = [item for item in draft_samples(drafts, most_accepted) if item.name == name]
        assert [item.labels for item in found] == [(str(number),) for number in range(len(found))]
        return [item.value for item in found]

    assert positions(256) == [8, *[5] * 15, 18]
    assert positions(16) == positions(256)
    assert sum(positions(256)) == 3 + 4 * 17 + 30
    drafts.num_drafts_by_accepted = [2, 3]
    assert positions(16) == [3, *[0] * 15]


def test_positions_are_told_by_source() -> None:
    """Each token counts where it was accepted, for the source that drafted it."""
    tree = DraftTree(5, 30)
    sources = [Source.MODEL] * 19 + [Source.CONTEXT]
    for node, source in enumerate(sources):
        tree.add_node(node, node, source)
    drafts = DraftCounts()
    for _ in range(2):
        count_draft(tree, Acceptance(range(21), range(21)), drafts)
    count_draft(tree, Acceptance([0], [7]), drafts)
    found = {(item.name, *item.labels): item.value for item in draft_samples(drafts, 16)}
    assert found["hdserve_drafts", "model"] == found["hdserve_drafts", "context"] == 3
    name = "hdserve_accepted_tokens_per_pos"
    by_position = [found[name, "model", str(position)] for position in range(17)]
    assert by_position == [*[2] * 16, 2 * 3]
    assert sum(by_position) == found["hdserve_accepted_tokens", "model"]
    assert found[name, "context", "16"] == found["hdserve_accepted_tokens", "context"] == 2
    assert found[name, "statistics", "0"] == found["hdserve_drafts", "statistics"] == 0


def test_observations_are_taken_once() -> None:
    """In order, and the oldest are lost where nobody takes them."""
    observations = Observations()
    histogram = Histogram("hdserve_lookup_seconds", ("model",), observations)
    for value in range(30_000):
        histogram.observe(float(value))
    found = list(observations.take())
    assert found[-1] == ("hdserve_lookup_seconds", 29_999.0, ("model",))
    assert [item.value for item in found] == [float(v) for v in range(30_000 - len(found), 30_000)]
    assert 1000 < len(found) < 30_000
    assert list(observations.take()) == []


def test_counters_of_a_replica_that_is_gone_stay_for_a_while() -> None:
    """Its gauges end at once, its counters after ``KEEP_S``; nobody else's do."""
    book = ReportBook()
    samples = (Sample("vllm:prompt_tokens", 5), Sample("hdserve_slots", 16))
    book.hear([Report("old", samples), Report("new", samples)], 10.0)
    assert book.reports(10.0) == [Report("old", samples), Report("new", samples)]
    book.hear([Report("new", samples)], 20.0)
    assert book.reports(20.0) == [Report("old", samples[:1]), Report("new", samples)]
    book.hear([Report("new", samples)], 10.1 + KEEP_S)
    assert book.reports(10.1 + KEEP_S) == [Report("new", samples)]


def test_request_clock() -> None:
    """The parts of a request's time add up; only refusals for lack of room count as such, by what
    there is no room for."""
    metrics = RequestMetrics()
    seq = Sequence("r", [1, 2, 3], SamplingParams())
    clock = metrics.clock(seq, time.monotonic())
    seq.admitted_s = time.monotonic()
    for token_ids in ((4,), (5, 6), (7,)):
        seq.token_ids += token_ids
        reason = FinishReason.STOP if token_ids == (7,) else None
        clock.observe(StepOutput(seq, token_ids, finish_reason=reason))
    full, grammar = Overloaded("full"), GrammarsOverloaded("new")
    for error in (full, full, grammar, InvalidRequest("wrong", "prompt")):
        with pytest.raises(type(error)), metrics.refusals():
            raise error
    values = {sample.name.removeprefix("vllm:"): sample.value for sample in metrics.samples()}
    refused = [item for item in metrics.samples() if item.name == "vllm:admission_rejections"]
    assert {item.labels: item.value for item in refused} == {("queue_full",): 2, ("grammars",): 1}
    histograms = {key: item for key, item in values.items() if isinstance(item, HistogramValue)}
    for name, histogram in histograms.items():
        assert sum(histogram.counts) == (2 if name == "inter_token_latency_seconds" else 1)
    total = {name: histogram.total for name, histogram in histograms.items()}
    assert total["request_prompt_tokens"] == 3
    assert total["request_generation_tokens"] == total["request_max_num_generation_tokens"] == 4
    first_s = total["time_to_first_token_seconds"]
    parts_s = total["request_queue_time_seconds"] + total["request_prefill_time_seconds"]
    assert first_s == pytest.approx(parts_s, abs=1e-6)
    assert total["e2e_request_latency_seconds"] == pytest.approx(
        first_s + total["request_decode_time_seconds"], abs=1e-6
    )
    assert total["request_decode_time_seconds"] == pytest.approx(
        total["inter_token_latency_seconds"], abs=1e-6
    )


def test_statistics_line() -> None:
    """Rates of the interval, not of all time; nothing when nothing ran."""

    def samples(prompt: int, drafts: int, accepted: int) -> list[Sample]:
        return [
            Sample("vllm:prompt_tokens", prompt),
            Sample("vllm:generation_tokens", 10 * prompt),
            Sample("vllm:num_requests_running", 2),
            Sample("vllm:num_requests_waiting", 1),
            Sample("vllm:kv_cache_usage_perc", 0.125),
            Sample("vllm:spec_decode_num_drafts", drafts),
            Sample("vllm:spec_decode_num_draft_tokens", 4 * drafts),
            Sample("vllm:spec_decode_num_accepted_tokens", accepted),
            Sample("hdserve_accepted_tokens", accepted, ("context",)),
            Sample("hdserve_accepted_tokens", 3, ("model",)),
        ]

    before = samples(100, 10, 20)
    assert statistics_line(before, before, 10.0) == ""
    assert statistics_line(before, samples(150, 20, 35), 10.0) == (
        "prompt 5.0 tokens/s, generation 50.0 tokens/s, running 2, waiting 1, KV cache 12.5%, "
        "mean acceptance length 2.50, drafted 40, accepted 15 (context 15)"
    )


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """One model, on a cluster this process is connected to, after some requests."""
    config = {
        "models": [{"name": MODEL, "model": MODEL, "num_cpus": 0.2, "engine": {"compile": False}}]
    }
    directory = tmp_path_factory.mktemp("serve")
    with (
        connected_cluster(2) as cluster,
        ServedApplication(directory, config, cluster.address) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def fresh(application: ServedApplication) -> Scrape:
    """What there is before anything was asked."""
    return Scrape(httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text)


@pytest.fixture(scope="module")
def num_tokens(application: ServedApplication, fresh: Scrape) -> tuple[int, int]:
    """Prompt and output tokens of the requests that were sent."""
    client = application.client()

    def ask(number: int) -> tuple[int, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"A table for {number % 2} in San Jose."}],
            temperature=0,
            max_tokens=60,
            extra_body={"ignore_eos": True, "frobnicate": number},
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens, answer.usage.completion_tokens

    with ThreadPoolExecutor(2) as pool:
        usages = list(pool.map(ask, range(NUM_REQUESTS)))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    return sum(prompt for prompt, _ in usages), sum(output for _, output in usages)


@pytest.fixture(scope="module")
def scrape(application: ServedApplication, num_tokens: tuple[int, int]) -> Scrape:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        response = httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S)
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = Scrape(response.text)
        if found.total("hdserve_mirror_outputs_total", direction="published") == NUM_REQUESTS:
            return found
        time.sleep(0.1)
    raise AssertionError("the outputs were not published")


@pytest.mark.ray
def test_every_metric_of_the_catalogue_is_emitted(scrape: Scrape) -> None:
    """And no other; each by the kind the catalogue says."""
    assert {name: family.type for name, family in scrape.families.items()} == {
        name: info.kind for name, info in METRICS.items()
    }


@pytest.mark.ray
def test_figures_agree(scrape: Scrape, num_tokens: tuple[int, int]) -> None:
    """Tokens are those the clients were told of, and the counters fit each other."""
    total = scrape.total
    assert total("vllm:prompt_tokens_total") == num_tokens[0]
    assert total("vllm:generation_tokens_total") == num_tokens[1] == 60 * NUM_REQUESTS
    assert total("vllm:request_success_total", finished_reason="length") == NUM_REQUESTS
    assert total("vllm:e2e_request_latency_seconds_count") == NUM_REQUESTS
    accepted = total("vllm:spec_decode_num_accepted_tokens_total")
    drafted = total("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < accepted <= drafted
    assert total("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert total("hdserve_accepted_tokens_total") == accepted
    assert total("hdserve_accepted_tokens_per_pos_total") == accepted
    assert total("hdserve_draft_tokens_total") == drafted
    assert total("hdserve_accepted_tokens_total", source="model") > 0
    assert total("hdserve_budget_kept_tokens_total") == drafted
    assert total("hdserve_step_draft_tokens_sum") == drafted
    num_drafts = total("vllm:spec_decode_num_drafts_total")
    num_steps = total("hdserve_step_draft_tokens_count")
    assert num_steps - total("hdserve_step_draft_tokens_bucket", le="0.0") == num_drafts
    assert num_steps + accepted == num_tokens[1]
    assert total("hdserve_budget_proposed_tokens_total") >= drafted
    assert total("hdserve_drafter_seconds_total", call="propose") > 0
    assert total("hdserve_database_entries", database="model") == NUM_REQUESTS
    assert total("hdserve_database_bytes", database="context") > 0
    assert total("hdserve_database_bytes", database="calibration") > 0
    assert total("hdserve_database_evictions_total") == 0
    assert total("hdserve_drafter_failures_total") == 0
    assert total("vllm:num_requests_running") == total("vllm:kv_cache_usage_perc") == 0
    chat = "/v1/chat/completions"
    assert total("hdserve_http_requests_total", route=chat, status="200") == NUM_REQUESTS
    assert total("hdserve_http_requests_total", status="404") == 1
    assert total("hdserve_http_request_seconds_count", route=chat) == NUM_REQUESTS
    assert total("hdserve_ignored_fields_total") == NUM_REQUESTS


def metrics_url() -> str:
    """Ray's own port."""
    node = ray.nodes()[0]
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


@pytest.mark.ray
def test_ray_exports_the_same(application: ServedApplication, scrape: Scrape) -> None:
    """Ray's metrics port shows each metric of a replica under its ``hdserve`` name."""
    url = metrics_url()
    wanted = {
        name: info
        for name, info in METRICS.items()
        if info.kind == "gauge" or scrape.total(f"{name}_{SUFFIXES[info.kind]}")
    }
    deadline = time.monotonic() + WAIT_S

    def is_late() -> bool:
        return time.monotonic() > deadline

    missing = set(wanted)
    while missing and not is_late():
        names = {
            family.name
            for family in text_string_to_metric_families(httpx.get(url, timeout=WAIT_S).text)
        }
        missing = {
            name
            for name, info in wanted.items()
            if f"ray_{ray_name(name)}{'_count' if info.is_per_step else ''}" not in names
        }
        time.sleep(0.5)
    assert not missing
    num_tokens, name = None, "ray_hdserve_generation_tokens_total"
    while num_tokens != scrape.total("vllm:generation_tokens_total") and not is_late():
        num_tokens = Scrape(httpx.get(url, timeout=WAIT_S).text).total(name, model_name=MODEL)
        time.sleep(0.5)
    assert num_tokens == scrape.total("vllm:generation_tokens_total")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("vllm:e2e_request_latency_seconds", {"model_name": MODEL}),
        ("vllm:request_generation_tokens", {"model_name": MODEL}),
        ("hdserve_http_request_seconds", {"route": "/v1/chat/completions"}),
    ],
)
def test_ray_has_the_same_buckets(
    name: str, labels: dict[str, str], application: ServedApplication, scrape: Scrape
) -> None:
    """What was observed before is in them, with count and exact sum; bounds are the catalogue's."""
    url = metrics_url()
    deadline = time.monotonic() + WAIT_S
    own = f"ray_{ray_name(name)}"
    wanted = [scrape.total(f"{name}_{suffix}", **labels) for suffix in ("count", "sum")]
    while True:
        found = Scrape(httpx.get(url, timeout=WAIT_S).text)
        totals = [
            found.total(f"{own}_{suffix}", **labels) for suffix in ("count", "exact_sum_total")
        ]
        if totals == pytest.approx(wanted) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert totals == pytest.approx(wanted)
    for bound in METRICS[name].bounds:
        (expected,) = scrape.values(f"{name}_bucket", le=str(bound), **labels)
        (bucket,) = (
            item.value
            for item in found.families[own].samples
            if item.name == f"{own}_bucket"
            and labels.items() <= item.labels.items()
            and float(item.labels["le"]) == pytest.approx(bound)
        )
        assert bucket == expected


@pytest.mark.ray
def test_counters_show_0_before_the_first_request(fresh: Scrape, scrape: Scrape) -> None:
    """Every series of a counter that there is later was there, so that the first increase shows."""

    def series(found: Scrape) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        return {
            (item.name, frozenset(item.labels.items()))
            for family in found.families.values()
            for item in family.samples
            if family.type == "counter"
        }

    assert series(scrape) <= series(fresh)
    chat = "/v1/chat/completions"
    for status in ("200", "400", "401", "404", "413", "429", "500", "503"):
        assert fresh.values("hdserve_http_requests_total", route=chat, status=status) == [0]
    assert fresh.values("hdserve_http_requests_total", route="unknown", status="401") == [0]


@pytest.mark.ray
def test_dashboard_and_alerts_read_what_is_emitted(scrape: Scrape) -> None:
    """Each series they name is in the answer, and each metric of the answer is read."""
    emitted = {item.name for family in scrape.families.values() for item in family.samples}
    named = series_named()
    assert named <= emitted
    read = {info.name for info in map(metric_of, named) if info is not None}
    assert read == scrape.families.keys()


@pytest.mark.ray
def test_look_ups_are_sampled_while_something_runs(
    application: ServedApplication, scrape: Scrape
) -> None:
    """A report made in mid-answer has a time for each database."""
    options = {"temperature": 0, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with application.client().completions.create(
        model=MODEL, prompt="A table for two", stream=True, **options
    ) as stream:
        for _ in stream:
            found = Scrape(httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text)
            if found.total("hdserve_lookup_seconds_count"):
                break
    for source in ("context", "model", "statistics"):
        assert found.total("hdserve_lookup_seconds_count", source=source) >= 1
        assert found.total("hdserve_lookup_seconds_sum", source=source) > 0
