"""A configuration is found in whatever deploys it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deployments.gateway import gateway_deployment
from deployments.model_deployment import model_deployment
from hdserve.access import read_access
from hdserve.cli.commands import app
from hdserve.config import default_config, parse_config
from hdserve.config.deployed import (
    GATEWAY_DEPLOYMENT,
    deployment_name,
    read_deployed_config,
)
from hdserve.doctor.gpus import with_gpus
from hdserve.errors import ConfigError

CONFIG = {"models": [{"name": "a", "model": "hdserve-mini"}]}
OTHER = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"models": "none"}}


def application(**more: Any) -> dict[str, Any]:
    return {"name": "hdserve", "import_path": "deployments:app", **more}


def serve_config(**more: Any) -> dict[str, Any]:
    return {"applications": [application(args={"config": CONFIG})], **more}


def beside(options: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A Serve config file with ``options`` beside the arguments, for its only model."""
    config = {"models": [{"name": "a", "model": "hdserve-mini", **model}]}
    deployments = [{"name": "model-a", **options}]
    return {"applications": [application(args={"config": config}, deployments=deployments)]}


NO_REPLICA = {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}


def scaled_by_hand(options: Any) -> dict[str, Any]:
    """An application whose only model has ``autoscaling``, and ``options`` beside that."""
    model = {"name": "a", "model": "hdserve-mini", "autoscaling": {"max_replicas": 2}}
    deployments = [{"name": "model-a", **options}]
    return {
        "applications": [application(args={"config": {"models": [model]}}, deployments=deployments)]
    }


def ray_service(config: Any) -> dict[str, Any]:
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    return {"kind": "RayService", "spec": {"serveConfigV2": text}}


def write(directory: Path, *documents: Any) -> Path:
    path = directory / "file.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


@pytest.mark.parametrize(
    ("documents", "port"),
    [
        ([CONFIG], None),
        ([serve_config()], 8000),
        ([serve_config(http_options={"port": 81})], 81),
        ([ray_service(serve_config(http_options={"port": 82}))], 82),
        ([OTHER, ray_service(serve_config()), None], 8000),
        ([{"applications": [{"import_path": "b:c"}, *serve_config()["applications"]]}], 8000),
    ],
)
def test_it_is_found(tmp_path: Path, documents: list[Any], port: int | None) -> None:
    found = read_deployed_config(write(tmp_path, *documents))
    assert found.config == parse_config(CONFIG)
    assert found.port == port


def test_the_file_of_the_arguments_is_read(tmp_path: Path) -> None:
    """As the application does; without one, the bundled models are served."""
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    named = application(args={"config": str(tmp_path / "config.yaml")})
    path = write(tmp_path, {"applications": [named]})
    assert read_deployed_config(path).config == parse_config(CONFIG)
    path = write(tmp_path, {"applications": [application()]})
    assert read_deployed_config(path).config == default_config()


def test_the_arguments_of_a_local_server_are_read(tmp_path: Path) -> None:
    """As `hdserve serve` writes them."""
    local = application(args={"is_local": True, "config": CONFIG})
    path = write(tmp_path, {"applications": [local]})
    assert read_deployed_config(path).config == parse_config(CONFIG)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([1], "keys with values are expected"),
        (OTHER, "one RayService is expected, there are 0 among ConfigMap"),
        ({"kind": "RayService", "spec": {}}, "spec.serveConfigV2: the text"),
        (ray_service("["), "spec.serveConfigV2: "),
        (ray_service("a: 2024-13-01"), "spec.serveConfigV2: month must be in 1..12"),
        (ray_service("[" * 1000), "spec.serveConfigV2: it is nested too deeply"),
        ({"applications": 3}, "applications: a list"),
        ({"applications": [{"import_path": "b:c"}]}, "there are 0 among b:c"),
        (
            {"applications": [application(args={"config": {"modles": []}})]},
            "did you mean 'models'",
        ),
        (
            ray_service({"applications": [application(args={"config": {"modles": []}})]}),
            "spec.serveConfigV2: applications.0.args.config:",
        ),
        ({"applications": [application(args={"conf": CONFIG})]}, "only key is `config`"),
        ({"applications": [application(args={"config": 3})]}, "a file or a mapping"),
        (serve_config(http_options={"port": "x"}), "http_options.port: 'x' is not a port"),
        (serve_config(http_options={"port": True}), "http_options.port: True is not a port"),
        (
            {
                "applications": [
                    application(args={"config": CONFIG}, deployments=[{"name": "model-b"}])
                ]
            },
            "there is no deployment 'model-b'; there are gateway, model-a",
        ),
        (
            scaled_by_hand({"num_replicas": 3}),
            "applications.0.deployments.0.num_replicas: Ray Serve passes over it",
        ),
        (
            beside(NO_REPLICA),
            "applications.0.deployments.0.autoscaling_config.min_replicas: 0 is to be in `args`",
        ),
        (beside({"num_replicas": 0}), "applications.0.deployments.0.num_replicas: "),
        (
            beside({"autoscaling_config": {"min_replicas": 2}}),
            "applications.0.deployments.0.autoscaling_config: max_replicas is below",
        ),
        (
            beside({"autoscaling_config": [1]}),
            "applications.0.deployments.0.autoscaling_config: a mapping is expected",
        ),
        (
            beside({"ray_actor_options": {"num_cpus": 8}}),
            "applications.0.deployments.0.ray_actor_options: Ray Serve takes them in place of all",
        ),
        (
            ray_service(
                {
                    "applications": [
                        application(deployments=[{"name": "gateway", "ray_actor_options": {}}])
                    ]
                }
            ),
            "spec.serveConfigV2: applications.0.deployments.0.ray_actor_options: ",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, document: Any, reason: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(ConfigError) as caught:
        read_deployed_config(path)
    assert reason in caught.value.message
    assert caught.value.message.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 4}}, (2, 2, 4)),
        ({"autoscaling_config": {"initial_replicas": 3, "max_replicas": 4}}, (1, 3, 4)),
        ({"num_replicas": 3, "autoscaling_config": None}, (3, 3, 3)),
        ({"autoscaling_config": None}, (1, 1, 1)),
        ({"max_surge_percent": 100}, (1, 1, 2)),
    ],
)
def test_a_model_that_scales_itself_is_told_otherwise(
    tmp_path: Path, options: dict[str, Any], bounds: tuple[int, int, int]
) -> None:
    """Other bounds, and none: all count for Ray Serve, and what they leave out is its default."""
    found = read_deployed_config(write(tmp_path, scaled_by_hand(options)))
    (model,) = found.config.models
    assert (model.min_num_replicas, model.first_num_replicas, model.max_num_replicas) == bounds


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto"}, 100),
        ({"autoscaling_config": {}}, 1),
        ({"autoscaling_config": None}, 2),
    ],
)
def test_a_model_that_does_not_scale_is_told_otherwise(
    tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    (model,) = read_deployed_config(write(tmp_path, beside(options, num_replicas=2))).config.models
    assert model.max_num_replicas == most


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto"}, 1),
        ({"num_replicas": "auto", "autoscaling_config": {"min_replicas": 2}}, 2),
        ({"num_replicas": None, "autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}, 1),
        ({"max_ongoing_requests": 300}, 2),
    ],
)
def test_of_gateways_that_scale_the_least_count(
    tmp_path: Path, options: dict[str, Any], least: int
) -> None:
    document = beside({})
    document["applications"][0]["args"]["config"]["gateway"] = {"num_replicas": 2}
    document["applications"][0]["deployments"] = [{"name": "gateway", **options}]
    found = read_deployed_config(write(tmp_path, document))
    assert found.config.gateway.num_replicas == least
    assert found.built.gateway.num_replicas == 2


def test_a_model_sleeps_where_gateways_know_it(tmp_path: Path) -> None:
    """They are built from the arguments."""
    scaling = {"min_replicas": 0, "max_replicas": 1}
    found = read_deployed_config(write(tmp_path, beside(NO_REPLICA, autoscaling=scaling)))
    (model,) = found.config.models
    assert (model.min_num_replicas, model.max_num_replicas) == (0, 2)


@pytest.mark.parametrize("number", [1, 2])
def test_warnings_are_of_the_numbers_that_count(number: int, tmp_path: Path) -> None:
    """Gateways of which each takes 300, and replicas that take 264 each, of which there are two."""
    document = beside({"num_replicas": 2})
    document["applications"][0]["deployments"].append(
        {"name": "gateway", "num_replicas": number, "max_ongoing_requests": 300}
    )
    path = write(tmp_path, document)
    checked = CliRunner().invoke(app, ["check-config", str(path)], catch_exceptions=False)
    assert "a: bundled model, 2 replicas" in checked.stdout
    assert ("gateway.max_ongoing_requests" in checked.stderr) == (number == 1)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"num_replicas": 3}, 20),
        ({"num_replicas": 3, "max_queued_requests": 29}, 29),
        ({"num_replicas": 3, "max_queued_requests": 30}, None),
        ({"num_replicas": 3, "max_queued_requests": -1}, None),
        ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 3}}, 20),
        ({"num_replicas": 1}, None),
        ({"max_surge_percent": 100}, None),
    ],
)
@pytest.mark.parametrize("is_for_pods", [False, True])
def test_a_queue_for_fewer_replicas_than_there_are(
    tmp_path: Path, is_for_pods: bool, options: dict[str, Any], held: int | None
) -> None:
    """Ray Serve takes its length from the arguments, unless it is next to them, too."""
    engine = {"max_num_sequences": 4, "max_num_queued": 6}
    document = beside(options, num_replicas=2, engine=engine)
    path = write(tmp_path, ray_service(document) if is_for_pods else document)
    checked = CliRunner().invoke(app, ["check-config", str(path)], catch_exceptions=False)
    assert checked.exit_code == 0
    where = "spec.serveConfigV2: " if is_for_pods else ""
    told = (
        f"warning: {where}applications.0.deployments.0.max_queued_requests: Ray Serve lets {held} "
        "requests for model-a wait at each gateway, and others are refused, although its replicas "
        "take 30; 30 is expected\n"
    )
    assert checked.stderr == (told if held else "")


@pytest.mark.parametrize("more", [CONFIG, None])
@pytest.mark.parametrize("document", [CONFIG, serve_config()])
def test_two_documents_in_one_file(tmp_path: Path, document: Any, more: Any) -> None:
    """Nor does a server take two, of which one is empty: a line of `---` ends no document."""
    with pytest.raises(ConfigError, match="one document is expected"):
        read_deployed_config(write(tmp_path, document, more))


@pytest.mark.parametrize("document", [CONFIG, serve_config()])
def test_the_environment_says_of_access_what_it_tells_a_server(
    tmp_path: Path, document: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever holds the configuration."""
    monkeypatch.setenv("HDSERVE_API_KEYS_FILE", "/keys")
    found = read_deployed_config(write(tmp_path, document)).config
    assert found.access.api_keys_file == Path("/keys")


def test_deployments_have_these_names() -> None:
    """Those of the application that is deployed."""
    config = with_gpus(parse_config(CONFIG), ())
    models = {"a": model_deployment(config.models[0], config)}
    gateway = gateway_deployment(config, models, read_access(config.access))
    assert gateway._bound_deployment.name == GATEWAY_DEPLOYMENT
    assert models["a"]._bound_deployment.name == deployment_name("a")


def test_the_commands_take_it(tmp_path: Path) -> None:
    """Models and port are those of the manifest."""
    path = str(write(tmp_path, OTHER, ray_service(serve_config(http_options={"port": 64321}))))
    checked = CliRunner().invoke(app, ["check-config", path], catch_exceptions=False)
    assert "a: bundled model, 1 replica" in checked.stdout
    result = CliRunner().invoke(app, ["doctor", "--config", path, "--json"], catch_exceptions=False)
    findings = {finding["subject"]: finding["text"] for finding in json.loads(result.stdout)}
    assert "64321" in findings["port"]
    assert "hdserve-mini" in findings["a: model"]
