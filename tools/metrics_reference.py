"""Write docs/metrics.md from the catalogue of metrics.

python -m tools.metrics_reference > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Iterator

from deployments.metrics.catalogue import METRICS, MetricInfo

_INTRODUCTION = """\
# Metrics

`GET /metrics` of every gateway has those of all models ([HTTP reference](http.md)). Ray's metrics
port has them as `ray_hdserve_*` ([monitoring](kubernetes-operations.md#monitoring)). Names that
begin with `vllm:` mean what they mean in vLLM, so that its dashboards read them. Series of a model
have the labels `model_name` and `engine`, the replica; those of a gateway have `gateway`. What to
look at first: [tuning](tuning.md#what-to-watch).

This page is written by `python -m tools.metrics_reference` from `deployments/metrics/catalogue.py`.
"""

_OWNERS = {False: "Of models", True: "Of gateways"}


def metrics_reference() -> str:
    """Return the whole page."""
    return _INTRODUCTION + "".join(_section(is_of_gateway) for is_of_gateway in _OWNERS)


def _section(is_of_gateway: bool) -> str:
    rows = "\n".join(_rows(is_of_gateway))
    title = _OWNERS[is_of_gateway]
    return f"\n## {title}\n\n| metric | kind | labels | |\n|---|---|---|---|\n{rows}\n"


def _rows(is_of_gateway: bool) -> Iterator[str]:
    for info in METRICS.values():
        if info.is_of_gateway == is_of_gateway:
            labels = ", ".join(f"`{label}`" for label in info.labels)
            yield f"| `{_shown_name(info)}` | {info.kind} | {labels} | {info.help} |"


def _shown_name(info: MetricInfo) -> str:
    return f"{info.name}_total" if info.kind == "counter" else info.name


if __name__ == "__main__":
    print(metrics_reference(), end="")
