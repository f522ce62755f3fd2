"""The parameters of a request that say how tokens are sampled, in all APIs."""

from __future__ import annotations

from pydantic import BaseModel


class SamplingFields(BaseModel):
    """What all APIs call the same; some have more."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
