"""All rows attend in one call as they do one by one, whatever the architecture."""

from __future__ import annotations

import pytest
import torch

from hdserve.core import Source
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.tree import DraftTree
from tests.engine.forward.test_static_batches import make_runner
from tests.engines import make_prompt
from tests.models import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def forwarded(runner: ModelRunner) -> torch.Tensor:
    """The logits of a tree, of a row that decodes plainly, and of the end of a prompt."""
    segments = [runner.cache.rows.allocate(100) for _ in range(3)]
    assert all(segments)
    own = [segment for segment in segments if segment is not None]
    prompts = [make_prompt(20 + number, number) for number in range(3)]
    runner.forward([Chunk(s, 0, p, None) for s, p in zip(own, prompts, strict=True)])
    tree = DraftTree(5, 9)
    for path in ([6, 7, 8], [9], [6, 10]):
        tree.add_path(path, Source.OTHER)
    chunks = [
        Chunk(own[0], 20, [5], tree),
        Chunk(own[1], 21, [5], DraftTree(5, 0)),
        Chunk(own[2], 22, [1, 2, 3], DraftTree(3, 0)),
    ]
    outputs = [found for found in runner.forward(chunks) if found is not None]
    return torch.cat([found.logits for found in outputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_attends_so(architecture: str, dtype: torch.dtype) -> None:
    """With grouped heads, windows and whatever else its layers do, all of it traced as for a GPU;
    up to rounding, which in float32 takes either way up to 1.1e-5 from float64 (Gemma 4, whose
    scores are not scaled)."""
    wanted = forwarded(make_runner(architecture, dtype, attends_in_one_call=False))
    found = forwarded(make_runner(architecture, dtype, attends_in_one_call=True))
    tolerance = 3e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
