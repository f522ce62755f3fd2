"""Whether, and how much, the model is to think before it answers, as clients say it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import BaseModel

from deployments.generation import THINKING_SWITCHES
from deployments.openai.body import Body, Truth
from hdserve.errors import InvalidRequest

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Body):
    """``thinking`` of Anthropic's API, and of the chats of DeepSeek and others."""

    type: Literal["adaptive", "between_tools", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be any."""
        return self.type != "disabled"

    @property
    def unmet(self) -> set[str]:
        """What is asked in vain: there is no budget but ``max_tokens``, and what was thought is
        shown as it is."""
        asked = {name for name in ("budget_tokens", "display") if getattr(self, name) is not None}
        return {f"thinking.{name}" for name in asked}


class ChatReasoning(Body):
    """``reasoning`` of a chat, as OpenRouter has it."""

    effort: ReasoningEffort | None = None
    enabled: Truth | None = None


class ThinkingFields(BaseModel):
    """The parameters of a chat that say it; the first is OpenAI's, the others are its forms
    elsewhere."""

    reasoning_effort: ReasoningEffort | None = None
    reasoning: ChatReasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: Truth | None = None

    @property
    def effort(self) -> tuple[str, ReasoningEffort | None]:
        """How much, and the parameter that says so."""
        if self.reasoning_effort is None and self.reasoning is not None:
            return "reasoning.effort", self.reasoning.effort
        return "reasoning_effort", self.reasoning_effort

    @property
    def switches(self) -> Mapping[str, bool]:
        """Whether the model is to think, by the parameters that say so."""
        found = {
            "thinking": None if self.thinking is None else self.thinking.is_wanted,
            "enable_thinking": self.enable_thinking,
            "reasoning.enabled": None if self.reasoning is None else self.reasoning.enabled,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def switch_variables(self) -> Mapping[str, Collection[str]]:
        """The variables of chat templates, in any of which a parameter is met, by its name."""
        return dict.fromkeys(self.switches, THINKING_SWITCHES)

    def switch_options(self) -> dict[str, bool]:
        """Return the variables of chat templates that say whether the model is to think.

        Raises:
            InvalidRequest: parameters contradict each other.
        """
        reasoning = self.reasoning
        if reasoning is not None and reasoning.enabled and reasoning.effort == "none":
            reason = "reasoning.effort and reasoning.enabled contradict each other"
            raise InvalidRequest(reason, "reasoning.effort")
        names, values = list(self.switches), set(self.switches.values())
        if len(values) > 1:
            raise InvalidRequest(f"{' and '.join(names)} contradict each other", names[0])
        return {variable: value for value in values for variable in THINKING_SWITCHES}
