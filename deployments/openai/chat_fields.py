"""The parameters of a request that say how its conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from deployments.openai.body import Truth
from hdserve.conversation import ChatEnd


class ChatFields(BaseModel):
    """What the chat template is given beside the messages."""

    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: Truth | None = None
    continue_final_message: Truth | None = None

    @property
    def changes_chats(self) -> bool:
        """Whether anything is asked for that a text alone has not."""
        is_default = self.add_generation_prompt is not False and not self.continue_final_message
        return bool(self.chat_template_kwargs) or not is_default

    @property
    def chat_end(self) -> ChatEnd:
        """Where the text of the conversation ends.

        Raises:
            InvalidRequest: the parameters contradict each other.
        """
        return ChatEnd.of(self.add_generation_prompt, bool(self.continue_final_message))
