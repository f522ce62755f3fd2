"""One application for all files of this directory; it ends with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clusters import connected_cluster
from tests.serving import ServedApplication

TEMPLATE = """<|im_start|>system
{{ note }}<|im_end|>
<|im_start|>user
{{ messages[0].content }}{{ " Answer at once." if enable_thinking else "" }}<|im_end|>
<|im_start|>assistant
{{ "" }}"""


@pytest.fixture(scope="package")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """Two replicas of one model, and a model with defaults for its requests that keeps rejected
    drafts to itself, on a cluster this process is connected to."""
    directory = tmp_path_factory.mktemp("serve")
    template = directory / "chat.jinja"
    template.write_text(TEMPLATE)
    shared: dict[str, Any] = {
        "model": "hdserve-mini",
        "num_cpus": 0.2,
        "drafting": {"adapts_budget": False},
    }
    mini = {**shared, "name": "hdserve-mini", "num_replicas": 2, "engine": {"exact": True}}
    assistant = {
        **shared,
        "name": "assistant",
        "chat_template": str(template),
        "engine": {"dtype": "float32", "exact": True},
        "show_rejected_drafts": False,
        "defaults": {
            "temperature": 0,
            "top_p": 0.75,
            "max_tokens": 7,
            "chat_template_kwargs": {"enable_thinking": True, "note": "Noted."},
        },
    }
    config = {
        "models": [mini, assistant],
        "model_database": {"snapshot_dir": str(directory / "database")},
    }
    with (
        connected_cluster(2) as cluster,
        ServedApplication(directory, config, cluster.address) as served,
    ):
        yield served
