"""What the models of a request's JSON body have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A part of a request; fields nobody documents are kept, so that they can be named."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class ClosedBody(BaseModel):
    """A part of a request in which a field nobody documents is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")
