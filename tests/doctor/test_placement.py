"""What a configuration reserves is compared with what there is, in fractions that add up."""

from __future__ import annotations

from typing import Any

import pytest

from actors import statistics_database
from hdserve.config import ServeConfig, default_config, parse_config
from hdserve.doctor.capacity import compare_resources
from hdserve.doctor.finding import Finding
from hdserve.doctor.placement import STATISTICS_CPUS, Process, processes, total, unplaced
from hdserve.errors import ConfigError


def configured(*models: dict[str, Any], **system: Any) -> ServeConfig:
    named = [{"name": f"m{n}", "model": "hdserve-mini", **model} for n, model in enumerate(models)]
    return parse_config({"models": named, **system})


def found(config: ServeConfig, *nodes: dict[str, float]) -> list[Finding]:
    return list(compare_resources(config, nodes, "this machine"))


def owners(config: ServeConfig) -> list[str]:
    return [process.owner for process in processes(config)]


def test_processes() -> None:
    """All that reserve something: of each model its replicas and actors."""
    database = {"num_shards": 2, "num_cpus": 0.3}
    models = ({"num_replicas": 2}, {"autoscaling": {"min_replicas": 0, "max_replicas": 5}})
    config = configured(*models, model_database=database, gateway={"num_replicas": 3})
    assert owners(config) == [
        "the statistics database",
        *["the model databases"] * 4,
        *["the gateway"] * 3,
        *["m0"] * 2,
    ]
    assert owners(configured({}, model_database={"is_enabled": False})) == [
        "the statistics database",
        "the gateway",
        "m0",
    ]
    scaling = {"initial_replicas": 4, "max_replicas": 5}
    assert owners(configured({"autoscaling": scaling})).count("m0") == 4


@pytest.mark.parametrize("number", [1, 3, 4, 10])
def test_fractions_add_up(number: int) -> None:
    """Ten tenths are one, and there is no room for another."""
    share = {"CPU": 1 / number}
    wanted = [Process(str(index), share) for index in range(number)]
    assert unplaced(wanted, [{"CPU": 1.0}]) == []
    assert len(unplaced([*wanted, Process("more", {"CPU": 0.001})], [{"CPU": 1.0}])) == 1


def test_one_core_is_enough_for_the_bundled_models() -> None:
    assert unplaced(processes(default_config()), [{"CPU": 1.0}]) == []


def test_a_process_is_on_one_node() -> None:
    """Halves of two nodes are no whole; what needs most is placed first."""
    large, small = Process("large", {"CPU": 1.0}), Process("small", {"CPU": 0.5})
    assert unplaced([large], [{"CPU": 0.5}, {"CPU": 0.5}]) == [large]
    assert unplaced([small, small, large], [{"CPU": 1.0}, {"CPU": 1.0}]) == []
    assert total([{"CPU": 0.1}] * 3, "CPU") == 0.3


@pytest.mark.parametrize(
    ("shares", "nodes", "num_unplaced"),
    [
        ([0.6] * 2, [2], 0),
        ([0.6] * 3, [2], 1),  # in sum they would fit
        ([0.5] * 4, [2], 0),
        ([0.3] * 7, [2], 1),
        ([0.75, 0.75, 0.25, 0.25], [2], 0),
        ([0.6] * 2, [1, 1], 0),
        ([0.6] * 3, [1, 1], 1),
        ([2, 0.5], [2.0, 1.0], 0),
        ([2], [1, 1], 1),
        ([1, 0.5], [1.5], 0),
        ([0.6], [0.5, 0.5], 1),
        ([1], [0], 1),
    ],
)
def test_a_part_of_a_gpu_is_on_one(
    shares: list[float], nodes: list[float], num_unplaced: int
) -> None:
    wanted = [Process(str(index), {"CPU": 0.1, "GPU": it}) for index, it in enumerate(shares)]
    assert len(unplaced(wanted, [{"CPU": 8, "GPU": it} for it in nodes])) == num_unplaced


def test_how_much_of_a_gpu_would_fit() -> None:
    """What is said of parts of GPUs says that they are of one, and the advice can be followed."""
    config = configured({"num_gpus": 0.6, "num_replicas": 3})
    (finding,) = found(config, {"CPU": 4, "GPU": 2})
    assert finding.text.startswith("1 of 3 processes cannot be placed: each reserves 0.5 CPU, 0.6 ")
    assert "0.6 of one GPU; all reserve 1.9 of 4 CPU, 1.8 of 2 GPU" in finding.text
    assert finding.remedy.startswith("num_gpus: 0.5  # ")
    mended = configured({"num_gpus": 0.5, "num_replicas": 3})
    assert [item.verdict for item in found(mended, {"CPU": 4, "GPU": 2})] == ["ok"]


def test_one_gpu_or_a_part_of_it() -> None:
    """More would be reserved and not used."""
    for number in (1.5, 2):
        with pytest.raises(ConfigError, match="a replica runs on one GPU"):
            configured({"num_gpus": number})
    for number in (0, 0.25, 1.0):
        assert configured({"num_gpus": number}).models[0].num_gpus == number


def test_the_statistics_actor_reserves_what_is_counted() -> None:
    assert statistics_database.NUM_CPUS == STATISTICS_CPUS


def test_what_fits_is_said_with_its_sum() -> None:
    (finding,) = found(configured({"num_cpus": 0.6}), {"CPU": 1})
    assert (finding.verdict, finding.text) == ("ok", "1 of 1 CPU of this machine are reserved")


def test_a_model_without_a_place_is_named() -> None:
    """With what it may reserve; that mends it."""
    config = configured({"num_cpus": 0.7}, {"num_replicas": 2, "num_cpus": 0.5})
    (finding,) = found(config, {"CPU": 2, "GPU": 0})
    assert finding.verdict == "failure"
    assert finding.subject == "m1: resources"
    assert finding.text.startswith("1 of 2 processes cannot be placed: each reserves 0.5 CPU; ")
    assert finding.text.endswith("all reserve 2.2 of 2 CPU of this machine")
    assert finding.remedy.startswith("num_cpus: 0.4  # ")
    mended = configured({"num_cpus": 0.7}, {"num_replicas": 2, "num_cpus": 0.4})
    assert [item.verdict for item in found(mended, {"CPU": 2})] == ["ok"]


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ({"num_gpus": 1}, "num_gpus: 0  # then on a CPU"),
        ({"resources": {"rack": 1}}, """ray start --resources='{"rack": 1.0}'"""),
        ({"num_cpus": 4, "num_replicas": 9}, "num_cpus: 0.17"),
        ({"num_cpus": 0.01, "num_replicas": 500}, "num_cpus: 0  # reserves none"),
    ],
)
def test_remedies(model: dict[str, Any], remedy: str) -> None:
    (finding,) = found(configured(model), {"CPU": 2})
    assert finding.subject == "m0: resources"
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("model", "has_effect"),
    [
        ({"num_cpus": 4}, True),
        ({"num_cpus": 4, "engine": {"num_threads": 2}}, False),
        ({"num_cpus": 0.9, "num_replicas": 3}, False),
    ],
)
def test_a_remedy_says_that_it_changes_the_threads(model: dict[str, Any], has_effect: bool) -> None:
    """As ``default_num_threads`` has it: from one core on, as many as are reserved."""
    (finding,) = found(configured(model), {"CPU": 2})
    assert ("threads" in finding.remedy) is has_effect


ASLEEP = {"min_replicas": 0}


@pytest.mark.parametrize(
    ("models", "nodes", "unplaced_models"),
    [
        ([{"num_cpus": 64, "autoscaling": ASLEEP}], [{"CPU": 4}], ["m0"]),
        ([{"num_cpus": 3, "autoscaling": ASLEEP}], [{"CPU": 4}], []),
        ([{"num_gpus": 1, "autoscaling": ASLEEP}] * 2, [{"CPU": 4, "GPU": 1}], []),
        ([{"num_gpus": 1}, {"num_gpus": 1, "autoscaling": ASLEEP}], [{"CPU": 4, "GPU": 1}], ["m1"]),
        (
            [
                {"num_gpus": 1, "autoscaling": {**ASLEEP, "initial_replicas": 1}},
                {"num_gpus": 1, "autoscaling": ASLEEP},
            ],
            [{"CPU": 4, "GPU": 1}],
            [],
        ),
        ([{"num_cpus": 3}, {"num_cpus": 2, "autoscaling": ASLEEP}], [{"CPU": 4}], ["m1"]),
        ([{"num_cpus": 3}, {"num_cpus": 2, "autoscaling": ASLEEP}], [{"CPU": 4}, {"CPU": 3}], []),
    ],
)
def test_a_model_that_sleeps_has_room_when_it_wakes(
    models: list[dict[str, Any]], nodes: list[dict[str, float]], unplaced_models: list[str]
) -> None:
    """Beside all that others need at least, which is nothing for those that sleep, too."""
    fitting, *others = found(configured(*models), *nodes)
    assert fitting.verdict == "ok"
    assert [item.verdict for item in others] == ["failure"] * len(unplaced_models)
    assert [item.subject for item in others] == [f"{name}: resources" for name in unplaced_models]


def test_what_lets_a_sleeping_model_wake() -> None:
    config = configured({"num_cpus": 64, "autoscaling": ASLEEP})
    _, finding = found(config, {"CPU": 4})
    start = "when it wakes, 1 of 1 processes cannot be placed: each reserves 64 CPU; "
    assert finding.text.startswith(start)
    assert finding.remedy.startswith("num_cpus: 3.6  # ")
    mended = configured({"num_cpus": 3.6, "autoscaling": ASLEEP})
    assert [item.verdict for item in found(mended, {"CPU": 4})] == ["ok"]


def test_what_the_gateway_may_reserve() -> None:
    """Its own section says it, and not a model's."""
    config = configured({}, gateway={"num_cpus": 4})
    (gateway,) = found(config, {"CPU": 1})
    assert gateway.subject == "the gateway: resources"
    assert gateway.remedy.startswith("gateway: {num_cpus: 0.3}  # ")


def test_resources_of_what_is_of_no_model() -> None:
    """They are counted, and missed where no node has them; those of the model databases are of the
    statistics database, too."""
    gateway, database = {"resources": {"hall": 0.5}}, {"resources": {"rack": 0.5}}
    config = configured({}, gateway=gateway, model_database=database)
    assert {finding.subject for finding in found(config, {"CPU": 2})} == {
        "the statistics database: resources",
        "the model databases: resources",
        "the gateway: resources",
    }
    assert [item.verdict for item in found(config, {"CPU": 2, "hall": 0.5, "rack": 1})] == ["ok"]


def test_a_cluster_may_grow() -> None:
    """What has no place on its nodes is no failure."""
    (finding,) = compare_resources(configured({}), [{"CPU": 0.5}], "the cluster", may_grow=True)
    assert finding.verdict == "warning"
    asleep = configured({"num_cpus": 64, "autoscaling": ASLEEP})
    found = compare_resources(asleep, [{"CPU": 4}], "the cluster", may_grow=True)
    assert [finding.verdict for finding in found] == ["ok", "warning"]
