"""The training recipe, on a corpus of a few hundred lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

from hdserve.models import bundled_model_path
from tools.train_bundled_models.chat import CHAT_TEMPLATE, render_chat
from tools.train_bundled_models.cli import app
from tools.train_bundled_models.corpus import (
    Document,
    read_documents,
    standard_library_documents,
)
from tools.train_bundled_models.evaluation import held_out_loss
from tools.train_bundled_models.packing import BatchSampler, PackedCorpus, pack
from tools.train_bundled_models.settings import SHAPES, Stage, TrainingSettings
from tools.train_bundled_models.tokenizer import train_tokenizer
from tools.train_bundled_models.training import TrainingRun

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
]


def rows() -> list[dict[str, object]]:
    """A corpus: conversations and notes, one row in ten held out, one source to exclude."""
    made: list[dict[str, object]] = []
    for number in range(200):
        split = "valid" if number % 10 == 9 else "train"
        common = {"id": str(number), "licence": "MIT", "split": split}
        notes = f"Note {number}: the river is {number * 7} metres long and {number} wide.\n" * 8
        made.append({**common, "kind": "docs", "source": "notes", "text": notes})
        made.append({**common, "kind": "chat", "source": "talk", "messages": CONVERSATION})
        secret = [{"role": "user", "content": "xyzzy"}]
        made.append({**common, "kind": "chat", "source": "GPTeacher a", "messages": secret})
    return made


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def documents(corpus_file: Path) -> list[Document]:
    return list(read_documents(corpus_file, with_standard_library=False))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(bundled_model_path("hdserve-tiny"))


@pytest.fixture(scope="module")
def packed(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> PackedCorpus:
    return pack(documents, tokenizer, tmp_path_factory.mktemp("tokens"))


def tiny_settings(**changes: object) -> TrainingSettings:
    values: dict[str, object] = {
        "size": "mini",
        "total_tokens": 256,
        "tokens_per_step": 64,
        "stages": (Stage(fraction=0.5, length_tokens=16), Stage(fraction=0.5, length_tokens=32)),
        "warmup_steps": 1,
    }
    return TrainingSettings.model_validate(values | changes)


def test_conversations_are_rendered_as_the_chat_template_renders_them(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert render_chat(CONVERSATION) == expected
    assert {document.text for document in documents if document.kind == "chat"} == {expected}


def test_excluded_sources_are_in_no_split(corpus_file: Path, documents: list[Document]) -> None:
    assert {document.source for document in documents} == {"notes", "talk"}
    everything = list(read_documents(corpus_file, (), with_standard_library=False))
    assert {document.source for document in everything} == {"notes", "talk", "GPTeacher a"}
    assert len(everything) == 600


def test_held_out_documents_are_not_trained_on(
    packed: PackedCorpus, tokenizer: PreTrainedTokenizerBase
) -> None:
    for split, numbers in (("train", range(0, 8)), ("valid", range(9, 200, 10))):
        text = tokenizer.decode(packed.streams[split]["docs"])
        other = tokenizer.decode(packed.streams["train" if split == "valid" else "valid"]["docs"])
        for number in numbers:
            assert f"Note {number}:" in text
            assert f"Note {number}:" not in other
    assert packed.sources["notes"].documents == 180


def test_documents_end_with_the_separator(
    packed: PackedCorpus, tokenizer: PreTrainedTokenizerBase
) -> None:
    stream = packed.streams["valid"]["chat"]
    one = [*tokenizer(render_chat(CONVERSATION))["input_ids"], 0]
    assert stream.tolist() == one * 20


def test_the_standard_library_is_mostly_training_text() -> None:
    splits = [document.split for document in standard_library_documents()]
    assert 0 < splits.count("valid") < 0.05 * len(splits)


def test_one_pass_visits_every_window_once(packed: PackedCorpus) -> None:
    stream = packed.streams["train"]["docs"]
    sampler = BatchSampler({"docs": stream}, {"docs": 1.0}, seed=1)
    num_windows = (len(stream) - 1) // 16
    seen = [sampler.batch(1, 16)[0].tobytes() for _ in range(num_windows)]
    shift = next(
        shift
        for shift in range(len(stream) - num_windows * 16)
        if stream[shift : shift + 17].astype("int64").tobytes() in seen
    )
    starts = range(shift, shift + num_windows * 16, 16)
    windows = [stream[start : start + 17].astype("int64").tobytes() for start in starts]
    assert sorted(seen) == sorted(windows)


@pytest.mark.parametrize("num_rows", [2, 16])
def test_batches_keep_the_mixture_on_average(packed: PackedCorpus, num_rows: int) -> None:
    weights = {"chat": 0.62, "docs": 0.38, "book": 0.5}
    sampler = BatchSampler(packed.streams["train"], weights, seed=0)
    for _ in range(400):
        assert sampler.batch(num_rows, 32).shape == (num_rows, 33)
    assert set(sampler.drawn_tokens) == {"chat", "docs"}
    share = sampler.drawn_tokens["chat"] / sum(sampler.drawn_tokens.values())
    assert share == pytest.approx(0.62, abs=0.04)


def test_a_mixture_without_text_is_refused(packed: PackedCorpus) -> None:
    sampler = BatchSampler(packed.streams["train"], {"book": 1.0}, seed=0)
    with pytest.raises(ValueError, match="no kind of text"):
        sampler.batch(1, 16)


def test_the_schedule_warms_up_falls_and_lengthens() -> None:
    settings = tiny_settings(total_tokens=64 * 100, warmup_steps=10, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)
    assert [settings.length_tokens(step) for step in (0, 49, 50, 99)] == [16, 16, 32, 32]


def test_a_resumed_run_ends_with_the_same_weights(
    packed: PackedCorpus, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    straight = TrainingRun(tiny_settings(), tokenizer)
    losses = [report.loss for report in straight.train(packed)]

    first = TrainingRun(tiny_settings(), tokenizer)
    steps = first.train(packed)
    early = [next(steps).loss, next(steps).loss]
    first.save(tmp_path / "checkpoint.pt")
    second = TrainingRun(tiny_settings(), tokenizer)
    second.restore(tmp_path / "checkpoint.pt")
    late = [report.loss for report in second.train(packed)]

    assert early + late == losses
    assert losses[-1] < losses[0]
    expected = straight.model.state_dict()
    for name, weight in second.model.state_dict().items():
        assert torch.equal(weight, expected[name])


def test_a_checkpoint_of_other_settings_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    TrainingRun(tiny_settings(), tokenizer).save(tmp_path / "checkpoint.pt")
    other = TrainingRun(tiny_settings(learning_rate=1e-4), tokenizer)
    with pytest.raises(ValueError, match="other settings"):
        other.restore(tmp_path / "checkpoint.pt")


def test_held_out_loss_is_the_mean_over_the_tokens(
    packed: PackedCorpus, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = TrainingRun(tiny_settings(), tokenizer).model.eval()
    stream = packed.streams["valid"]["docs"]
    result = held_out_loss(model, {"docs": stream}, 300, max_tokens_per_kind=301)
    tokens = torch.tensor([stream[:301].tolist()])
    with torch.inference_mode():
        expected = model(input_ids=tokens, labels=tokens).loss
    assert result.by_kind["docs"].mean == pytest.approx(float(expected), rel=1e-4)
    assert {end: part.num_tokens for end, part in result.by_position.items()} == {256: 256, 512: 44}


def test_shapes_have_the_sizes_their_cards_name(tokenizer: PreTrainedTokenizerBase) -> None:
    sizes = {}
    for name, shape in SHAPES.items():
        config = shape.llama_config(tokenizer)
        with torch.device("meta"):
            sizes[name] = AutoModelForCausalLM.from_config(config).num_parameters()
    assert sizes == {"mini": 2_254_464, "tiny": 8_524_032}


def test_a_trained_tokenizer_knows_the_special_tokens(documents: list[Document]) -> None:
    tokenizer = train_tokenizer(documents, vocab_size=300)
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer("Größe €5 → ok")["input_ids"]) == "Größe €5 → ok"
    learnt = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert learnt == render_chat(CONVERSATION)


def test_the_commands_make_a_model_that_loads_and_generates(
    corpus_file: Path, tmp_path: Path
) -> None:
    work, model = str(tmp_path / "work"), tmp_path / "model"
    tokenizer_directory = bundled_model_path("hdserve-tiny")
    assert tokenizer_directory is not None
    tokenizer_option = ["--tokenizer", str(tokenizer_directory)]
    prepare = ["prepare", str(corpus_file), "--work", work, "--no-standard-library"]
    train = ["train", "--work", work, "--size", "mini", "--tokens", "4096", "--no-compile"]
    steps = ["--tokens-per-step", "2048", "--device", "cpu"]
    for command in (
        [*prepare, *tokenizer_option],
        [*train, *steps],
        ["export", "--work", work, "--output", str(model)],
    ):
        outcome = CliRunner().invoke(app, command, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output

    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == [2, 0]
    prompt = tokenizer("<|im_start|>user\nHello", return_tensors="pt")
    output = loaded.generate(**prompt, max_new_tokens=4, min_new_tokens=4)
    assert output.shape[1] == prompt["input_ids"].shape[1] + 4
    expected = (tokenizer_directory / "tokenizer.json").read_bytes()
    assert (model / "tokenizer.json").read_bytes() == expected
    record = json.loads((model / "training.json").read_text(encoding="utf-8"))
    assert record["tokens"] == 4096
