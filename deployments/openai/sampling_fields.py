"""The parameters of a request that say how tokens are sampled, in all APIs."""

from __future__ import annotations

from pydantic import BaseModel

from deployments.openai.body import Number, OptionalInteger


class SamplingFields(BaseModel):
    """What all APIs call the same; some have more."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: OptionalInteger = None
    min_p: Number | None = None
    seed: OptionalInteger = None
