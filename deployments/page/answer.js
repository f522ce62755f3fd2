// One streamed answer: its tokens, coloured by source, and what drafting did for it.

import { element } from "./dom.js";
import { showDraft, hideDraft } from "./draft.js";

export const SOURCES = ["context", "model", "statistics", "recycled", "other"];

export class Answer {
  constructor(label) {
    this.text = "";
    this.reasoning = "";
    this.reasoningElement = null;
    this.steps = []; // [{tokens: [{text, source}], draft: [...]}]
    this.finishReason = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.summary = null;
    this.element = element("div", { class: "answer", role: "group", "aria-label": label, "aria-busy": "true" });
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  add(chunk) {
    if (chunk.metrics) this.summary = { ...chunk.metrics.speculative_decoding, ...chunk.usage };
    const choice = chunk.choices[0];
    if (!choice) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    const content = choice.delta.content ?? "";
    this.text += content;
    this.reasoning += choice.delta.reasoning_content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const step = { tokens: choice.token_sources ?? [], draft: choice.draft ?? [] };
    if (step.tokens.length) {
      this.steps.push(step);
      const [thought, said] = divided(step.tokens, content.length);
      if (thought.length) this.#addStep(this.#reasoningElement(), step, thought);
      if (said.length) this.#addStep(this.element, step, said);
    }
  }

  end() {
    this.element.setAttribute("aria-busy", "false");
  }

  get numTokens() {
    return this.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  }

  // Tokens after the first step over the time since it: what the reader sees.
  get tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const first = this.steps[0]?.tokens.length ?? 0;
    return seconds > 0 ? (this.numTokens - first) / seconds : NaN;
  }

  get seconds() {
    return ((this.lastMs ?? performance.now()) - this.startedMs) / 1000;
  }

  // Tokens per verified draft: the one the model adds to each counts.
  get meanAcceptanceLength() {
    const drafts = this.steps.filter((step) => step.draft.length);
    return drafts.reduce((sum, step) => sum + step.tokens.length, 0) / drafts.length;
  }

  get acceptedBySource() {
    const counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    for (const step of this.steps) for (const token of step.tokens) if (token.source in counts) counts[token.source] += 1;
    return counts;
  }

  #reasoningElement() {
    if (!this.reasoningElement) {
      this.reasoningElement = element("details", { class: "reasoning", open: true }, element("summary", {}, "Reasoning"));
      this.element.append(this.reasoningElement);
    }
    return this.reasoningElement;
  }

  // One element a step and one a token: of each block only one step is in the tab order, arrows move between them.
  #addStep(block, step, tokens) {
    const index = this.steps.length;
    const numAccepted = count(step);
    const made = element("span", {
      class: "step",
      tabindex: block.querySelector(":scope > .step") ? "-1" : "0",
      onmouseenter: () => showDraft(made, step, index),
      onmouseleave: hideDraft,
      onfocus: () => showDraft(made, step, index),
      onblur: hideDraft,
    });
    made.dataset.accepted = numAccepted;
    for (const token of tokens) {
      if (token.text) made.append(element("span", { class: `token ${token.source}` }, token.text));
    }
    block.append(made);
  }

  #move(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const steps = [...this.element.querySelectorAll(":scope > .step, [open] > .step")];
    const at = steps.indexOf(document.activeElement);
    if (event.key === "Escape") hideDraft();
    if (at < 0 || !(event.key in moves)) return;
    event.preventDefault();
    const next = steps[Math.min(steps.length - 1, Math.max(0, at + moves[event.key]))];
    steps[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

// Tokens of reasoning and its marks, and those of the last `numSaid` characters.
function divided(tokens, numSaid) {
  let at = tokens.length;
  for (let rest = numSaid; at > 0 && rest > 0; at -= 1) rest -= tokens[at - 1].text.length;
  const thought = tokens.slice(0, at);
  return thought.some((token) => token.text) ? [thought, tokens.slice(at)] : [[], tokens];
}

function count(step) {
  return step.tokens.filter((token) => token.source !== "plain").length;
}
