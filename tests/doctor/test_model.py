"""What the doctor says of devices, compilers, weights and files of models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers.utils import is_accelerate_available

from hdserve.doctor.finding import Finding, Verdict
from hdserve.doctor.model import check_compiler, check_device, check_model, check_weights
from hdserve.doctor.weights import weight_bytes
from hdserve.engine.hardware import description
from hdserve.models import bundled_model_path, bundled_statistics
from tests.doctor.findings import configured, verdicts
from tests.ports import free_port


def test_device() -> None:
    """A GPU that is wanted and not there is a failure."""
    (finding, *_) = check_device(configured(engine={"device": "auto"}))
    assert finding.verdict is not Verdict.FAILURE
    import torch

    if not torch.cuda.is_available():
        wanted = configured(engine={"device": "cuda"})
        assert verdicts(check_device(wanted)) == ["failure"]


def test_a_gpu_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch is what helps, whether the model would run on the CPU or not at all."""
    monkeypatch.setattr(description, "_NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, verdict in (("auto", "warning"), ("cuda", "failure")):
        (finding,) = check_device(configured(engine={"device": device}))
        assert verdicts([finding]) == [verdict]
        assert finding.remedy.startswith("make setup TORCH_INDEX=")
    (finding,) = check_device(configured(engine={"device": "cuda"}), is_elsewhere=True)
    assert verdicts([finding]) == ["warning"]


def test_a_machine_that_need_not_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the head of a cluster: where a model reserves one there is one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for model in (
        configured(num_gpus=1, engine={"device": "cuda"}),
        configured(num_gpus=0.5),
    ):
        assert verdicts(check_device(model, is_elsewhere=True)) == ["warning"]
        assert verdicts(check_weights(model, is_elsewhere=True)) == []
    assert verdicts(check_device(configured(num_gpus=0), is_elsewhere=True)) == ["ok"]


def test_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine, so it is no failure where others serve the model."""
    model = configured(engine={"device": "cpu"})
    assert verdicts(check_weights(model)) == []
    monkeypatch.setattr(description, "free_bytes", lambda _device, _share: 0.0)
    assert verdicts(check_weights(model)) == ["failure"]
    assert verdicts(check_weights(model, is_elsewhere=True)) == ["warning"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_gpus": 0.5}, []),
        ({"num_gpus": 0.25}, ["failure"]),
        ({"num_gpus": 0.25, "engine": {"kv_cache_tokens": 4096}}, []),
    ],
    ids=str,
)
def test_weights_have_to_fit_the_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[str]
) -> None:
    """Unless the cache has a size that was chosen: then the engine looks at the whole GPU, too."""
    config = configured(**options)
    needed = weight_bytes(config)
    monkeypatch.setattr(description, "free_bytes", lambda _device, share: 3 * share * needed)
    assert verdicts(check_weights(config)) == expected


@pytest.mark.parametrize(
    ("wanted", "with_compiler", "without"),
    [("auto", ["ok"], ["warning"]), (True, ["ok"], ["failure"]), (False, [], [])],
)
def test_compiler(wanted: object, with_compiler: list[str], without: list[str]) -> None:
    """Without one a model is slower, or not served if it has to be compiled; the headers are of the
    Python that runs, which need not be the distribution's."""
    config = configured(engine={"device": "cpu", "compile": wanted})
    assert verdicts(check_compiler(config, can_compile=True)) == with_compiler
    assert verdicts(check_compiler(config, can_compile=False)) == without
    headers = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    for finding in check_compiler(config, can_compile=False):
        assert finding.remedy.startswith(f"sudo apt-get install g++ {headers} ")


@pytest.mark.parametrize(("wanted", "verdict"), [("auto", "warning"), (True, "failure")])
def test_a_compiler_whose_paths_have_spaces(
    wanted: object, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own directory, or that of its cache: nothing would be compiled."""
    config = configured(engine={"device": "cpu", "compile": wanted})
    place = tmp_path / "a cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place))
    (of_cache,) = check_compiler(config, can_compile=True)
    assert f"paths with spaces ({place}): " in of_cache.text
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "__file__", "/srv/my models/torch/__init__.py")
    (of_torch,) = check_compiler(config, can_compile=True)
    assert "paths with spaces (/srv/my models/torch): " in of_torch.text
    assert verdicts([of_cache, of_torch]) == [verdict] * 2


def test_model_and_statistics(tmp_path: Path) -> None:
    """Statistics that are missing, or of another tokenizer, are named: it serves without them."""
    (statistics, *_) = bundled_statistics()
    assert verdicts(check_model(configured())) == ["ok", "ok"]
    assert verdicts(check_model(configured(statistics=None))) == ["ok", "ok"]
    found = configured(statistics=str(statistics))
    assert verdicts(check_model(found)) == ["ok", "ok"]
    missing = configured(statistics=str(tmp_path / "none"))
    assert verdicts(check_model(missing)) == ["ok", "warning"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    info = json.loads((statistics / "info.json").read_text())
    (foreign / "info.json").write_text(json.dumps({**info, "tokenizer": "0" * 64}))
    other = configured(statistics=str(foreign))
    assert verdicts(check_model(other)) == ["ok", "warning"]


def test_a_model_without_weights(tmp_path: Path) -> None:
    """A directory with a tokenizer alone is no model."""
    source = bundled_model_path("hdserve-mini")
    assert source is not None
    shutil.copytree(source, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    bare = configured(model=str(tmp_path / "m"))
    assert verdicts(check_model(bare)) == ["failure"]
    (tmp_path / "m" / "pytorch_model.bin").touch()
    (found,) = check_model(bare)
    assert found.remedy.startswith("load_format: auto")
    assert verdicts(check_model(bare)) == ["failure"]
    pickled = configured(model=str(tmp_path / "m"), load_format="auto")
    assert verdicts(check_model(pickled)) == ["ok", "ok"]


def copied(directory: Path, *left_out: str) -> Path:
    """A bundled model without some of its files."""
    source = bundled_model_path("hdserve-mini")
    assert source is not None
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*left_out))
    return directory


def test_a_model_whose_files_do_not_belong_together(tmp_path: Path) -> None:
    """What is missing, or is there in part, is named."""

    def fault(place: Path) -> str:
        (finding,) = check_model(configured(model=str(place)))
        assert verdicts([finding]) == ["failure"]
        return finding.text

    bare = copied(tmp_path / "bare", "config.json")
    assert fault(bare) == f"{bare} has no config.json"

    cut = copied(tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    assert fault(cut.parent).startswith(f"{cut} is damaged: ")

    sharded = copied(tmp_path / "sharded")
    (sharded / "model.safetensors").rename(sharded / "a.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    assert fault(sharded) == f"{sharded}/b.safetensors is missing, which {index.name} names"
    for unread in ("{", json.dumps({"weight_map": {"x": "a.safetensors"}})):
        index.write_text(unread)
        assert fault(sharded).startswith(f"{index}: cannot be read: ")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors"}}))
    assert verdicts(check_model(configured(model=str(sharded)))) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "layers of type linear_attention are not served"),
        ("foobar", "foobar"),
        ("vit", "transformers has no causal language model of this architecture"),
    ],
)
def test_a_model_that_would_not_be_served(model_type: str, reason: str, tmp_path: Path) -> None:
    place = copied(tmp_path / "m") / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "model_type": model_type}))
    (found,) = check_model(configured(model=str(place.parent)))
    assert verdicts([found]) == ["failure"]
    assert reason in found.text


def test_a_model_that_would_not_be_served_needs_no_tokenizer(tmp_path: Path) -> None:
    """None is to be downloaded for a model of pictures, which has none."""
    place = copied(tmp_path / "m")
    (place / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (place / "tokenizer.json").unlink()
    (found,) = check_model(configured(model=str(place)))
    assert "no causal language model" in found.text
    assert found.remedy == "model: OWNER/MODEL  # of another architecture"


def test_a_model_whose_code_needs_a_missing_package(tmp_path: Path) -> None:
    place = copied(tmp_path / "m")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (place / "config.json").write_text(json.dumps(own))
    (place / "own.py").write_text("import nothing_here\n")
    (found,) = check_model(configured(model=str(place), trust_remote_code=True))
    assert verdicts([found]) == ["failure"]
    assert "nothing_here" in found.text


def test_what_is_no_model_is_left_as_it_is(tmp_path: Path) -> None:
    """Nothing is to be downloaded into a directory that has something else in it."""
    (found,) = check_model(configured(model=str(tmp_path)))
    assert found.remedy.startswith("model: OWNER/MODEL")
    (found,) = check_model(configured(model=str(tmp_path / "new")))
    assert found.remedy == f"hf download OWNER/MODEL --local-dir {tmp_path}/new"


def test_weights_are_those_that_are_loaded(tmp_path: Path) -> None:
    """In the dtype of the engine, and once, whatever other copies lie beside them."""
    place = copied(tmp_path / "m")
    shutil.copy(place / "model.safetensors", place / "consolidated.safetensors")

    def num_bytes(dtype: str) -> int:
        return weight_bytes(configured(model=str(place), engine={"device": "cpu", "dtype": dtype}))

    file_bytes = (place / "model.safetensors").stat().st_size
    assert num_bytes("bfloat16") == file_bytes
    assert num_bytes("float32") == pytest.approx(2 * file_bytes, rel=0.01)


def test_weights_that_a_cpu_has_to_dequantise_are_counted_so(tmp_path: Path) -> None:
    """FP8, and MXFP4 of two numbers a byte; other bytes stay as they are."""
    place = copied(tmp_path / "m")
    weights = place / "model.safetensors"
    tensors = {
        "a.weight": torch.zeros(10, 10, dtype=torch.float8_e4m3fn),
        "b_blocks": torch.zeros(10, 10, dtype=torch.uint8),
        "c.weight": torch.zeros(10, 10, dtype=torch.uint8),
    }
    save_file(tensors, weights)
    model = configured(model=str(place), engine={"device": "cpu", "dtype": "bfloat16"})
    assert weight_bytes(model) == weights.stat().st_size + 100 + 300


@pytest.mark.skipif(is_accelerate_available(), reason="transformers has all it needs")
def test_a_package_that_quantised_weights_need_is_said_to_be_missing(tmp_path: Path) -> None:
    place = copied(tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (place / "config.json").write_text(json.dumps(config))
    (found,) = check_model(configured(model=str(place), engine={"device": "cpu"}))
    assert "requires accelerate" in found.text
    assert verdicts([found]) == ["failure"]
    assert found.remedy == "python -m pip install 'hdserve[quantized]'"


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised as 'modelopt'"),
        ({"weight_block_size": [128, 128]}, "quant_method"),
    ],
)
def test_a_quantisation_that_transformers_does_not_know(
    tmp_path: Path, quantization: dict[str, object], text: str
) -> None:
    """No package helps, but another checkpoint does."""
    place = copied(tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    (found,) = check_model(configured(model=str(place), engine={"device": "cpu"}))
    assert text in found.text
    assert verdicts([found]) == ["failure"]
    assert found.remedy.endswith("# another checkpoint of the model, such as one in bfloat16")


def test_weights_of_the_hub_are_those_that_were_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are not on this machine, that is said: they may not fit into its memory."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = configured(model="OWNER/MODEL", engine={"device": "cpu", "dtype": "bfloat16"})

    def memory() -> list[Finding]:
        return [finding for finding in check_weights(model) if finding.subject == "m: memory"]

    (finding,) = memory()
    assert verdicts([finding]) == ["warning"]
    assert finding.remedy == "hf download OWNER/MODEL"
    kept = tmp_path / "models--OWNER--MODEL"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    place = copied(kept / "snapshots" / "abc")
    assert memory() == []
    weights = place / "model.safetensors"
    assert weight_bytes(model) == weights.stat().st_size
    index = {"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.rename(place / "a.safetensors")
    assert verdicts(memory()) == ["warning"]  # of its shards, one is not there


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """Instead of a minute of questions; the remedy needs no hub."""
    path = tmp_path / "serve.yaml"
    path.write_text("models: [{name: a, model: OWNER/MODEL}]")
    away = {
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from hdserve.cli import main; main()",
            "doctor",
            "--json",
            "--config",
            str(path),
        ],
        env=os.environ | away,
        capture_output=True,
        text=True,
    )
    (found,) = [finding for finding in json.loads(done.stdout) if finding["subject"] == "a: model"]
    assert found["text"].startswith("the hub cannot be asked for OWNER/MODEL")
    assert found["remedy"].startswith("model: DIRECTORY")
    assert "Retrying" not in done.stderr
