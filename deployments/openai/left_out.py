"""What of a request the model is not told of, though conversations go on without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.openai.body import Body

MEDIA: Mapping[str, str] = {
    "audio": "audio",
    "audio_url": "audio",
    "browser_state": "browser state",
    "document": "document",
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "video_url": "video",
}
"""The types of the parts, of any API, in which tools return what is no text, and what each is."""


class LeftOut(Body):
    """A tool that agents offer to every server, and go on without, or what another server did
    itself."""

    type: str

    def unread_fields(self) -> dict[str, Any]:
        """Return nothing, as the whole of it is not read."""
        return {}


class Media(LeftOut):
    """What a tool returned that is no text, of a type that is one of :data:`MEDIA`."""

    @property
    def text(self) -> str:
        """The text that stands for it."""
        return stand_in(self.type)


def is_media(kind: Any) -> bool:
    """Return whether a ``type`` is one of :data:`MEDIA`."""
    return isinstance(kind, str) and kind in MEDIA


def stand_in(kind: str) -> str:
    """Return the text that the model is told instead of a part, of whose type :data:`MEDIA` has
    the name: without a word it would take the result for an empty one."""
    return f"[{MEDIA[kind]} left out: this model reads text only]"
