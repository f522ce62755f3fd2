"""Who runs on a GPU is decided for all models together, by what the nodes have."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hdserve.config import ModelConfig, ServeConfig, parse_config
from hdserve.doctor.gpus import on_its_device, shortage, with_gpus

CUDA, CPU = {"engine": {"device": "cuda"}}, {"engine": {"device": "cpu"}}
SCALED = {"autoscaling": {"min_replicas": 0, "max_replicas": 9}}
TWO = {"num_replicas": 2}
GROWN = {"autoscaling": {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 2}}


def configured(*models: dict[str, Any]) -> ServeConfig:
    named = [{"name": f"m{n}", "model": "hdserve-mini", **model} for n, model in enumerate(models)]
    return parse_config({"models": named})


def nodes(*numbers: float) -> list[dict[str, float]]:
    return [{"CPU": 8, "GPU": number} if number else {"CPU": 8} for number in numbers]


def num_gpus(config: ServeConfig, *numbers: float) -> list[float | None]:
    return [model.num_gpus for model in with_gpus(config, nodes(*numbers)).models]


@pytest.mark.parametrize(
    ("models", "gpus", "wanted"),
    [
        ([{}], [0], [0]),
        ([{}], [], [0]),
        ([{}], [1], [1]),
        ([{}], [0, 1], [1]),
        ([{}, {}], [1], [0, 0]),  # all or none
        ([{}, {}], [2], [1, 1]),
        ([{}, {}], [1, 1], [1, 1]),
        ([TWO], [1], [0]),
        ([TWO], [1, 1], [1]),
        ([SCALED], [0], [0]),  # it has to answer, sometimes
        ([SCALED], [1], [1]),
        ([GROWN], [1], [0]),
        ([GROWN], [2], [1]),
        ([{}], [0.5], [0]),
    ],
)
def test_a_gpu_for_each_replica(
    models: list[dict[str, Any]], gpus: list[float], wanted: list[float]
) -> None:
    assert num_gpus(configured(*models), *gpus) == wanted


@pytest.mark.parametrize(
    ("models", "gpus", "wanted"),
    [
        ([{"num_gpus": 1}, {}], [1], [1, 0]),
        ([{"num_gpus": 1}, {}], [2], [1, 1]),
        ([{"num_gpus": 0.5}, {}], [1], [0.5, 0]),
        ([{"num_gpus": 0.6}, {"num_gpus": 0.6}, {}], [2], [0.6, 0.6, 0]),
        ([{"num_gpus": 1, "num_replicas": 3}, {}], [1], [1, 0]),  # more than there are
        ([{"num_gpus": 0}, {}], [1], [0, 1]),
        ([{"num_gpus": 0.25}], [0], [0.25]),
        ([CUDA, {}], [1], [1, 0]),
        ([CUDA], [0], [1]),  # it waits for one
        ([CPU, {}], [1], [0, 1]),
        ([CUDA | {"num_gpus": 0}, {}], [1], [0, 1]),
    ],
)
def test_beside_what_others_reserve(
    models: list[dict[str, Any]], gpus: list[float], wanted: list[float]
) -> None:
    """What is written stays as it is."""
    assert num_gpus(configured(*models), *gpus) == wanted


def test_custom_resources_say_on_which_nodes() -> None:
    """A GPU of a node without them is none for that model; CPUs do not matter."""
    config = configured({"resources": {"rack": 1}, "num_cpus": 100})
    for number, rack in ((0.0, {"GPU": 0.0, "rack": 1.0}), (1.0, {"GPU": 1.0, "rack": 1.0})):
        (model,) = with_gpus(config, [{"GPU": 1}, rack]).models
        assert model.num_gpus == number


def test_custom_resources_that_are_not_known() -> None:
    """As before Ray is there, or where a node is to come: they are no matter of GPUs."""
    config = configured({"resources": {"rack": 1}}, {})
    assert num_gpus(config, 2) == [1, 1]
    assert shortage(config, nodes(2)) is None


def test_nothing_else_changes() -> None:
    config = configured({}, {"num_gpus": 0.5})
    found = with_gpus(config, nodes(8))
    (first, second) = found.models
    assert first == config.models[0].model_copy(update={"num_gpus": 1})
    assert second == config.models[1]
    assert found.model_copy(update={"models": config.models}) == config


@pytest.mark.parametrize(
    ("models", "gpus", "remedy"),
    [
        ([{}, {}], 1, {"num_gpus": 0.5}),
        ([TWO, {}], 1, {"num_gpus": 0.33}),
        ([{}, {}, {"num_gpus": 1}], 2, {"num_gpus": 0.5}),
        ([{"num_gpus": 1}, {}], 1, {"num_gpus": 0}),
        ([CUDA, {}], 1, {"num_gpus": 0}),
    ],
)
def test_gpus_that_are_too_few(
    models: list[dict[str, Any]], gpus: float, remedy: dict[str, float]
) -> None:
    """With what mends it: then every model has what is said of it."""
    config = configured(*models)
    found = shortage(config, nodes(gpus))
    assert found is not None
    names = [
        model.name
        for model, wanted in zip(config.models, models, strict=True)
        if not wanted.keys() & {"num_gpus", "engine"}
    ]
    assert found.text.startswith(f"{', '.join(names)}: on the CPU, since num_gpus is left out")
    assert yaml.safe_load(found.remedy) == remedy
    mended = [
        wanted if "num_gpus" in wanted or "engine" in wanted else wanted | remedy
        for wanted in models
    ]
    assert shortage(configured(*mended), nodes(gpus)) is None


@pytest.mark.parametrize(
    ("models", "gpus"),
    [([{}], 0), ([{}], 1), ([CPU], 1), ([CUDA], 0), ([{"num_gpus": 0}], 1), ([{}, {}], 2)],
)
def test_nothing_is_said_where_there_are_enough_or_none(
    models: list[dict[str, Any]], gpus: float
) -> None:
    assert shortage(configured(*models), nodes(gpus)) is None


@pytest.mark.parametrize(
    ("device", "number", "found"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "auto"),
        ("auto", None, "auto"),
        ("cuda", 0, "cuda"),
        ("cpu", 1, "cpu"),
    ],
)
def test_the_device_of_a_replica(device: str, number: float | None, found: str) -> None:
    """Ray shows it no GPU that it has not reserved."""
    values = {"name": "m", "model": "m", "num_gpus": number, "engine": {"device": device}}
    assert on_its_device(ModelConfig.model_validate(values)).engine.device == found
