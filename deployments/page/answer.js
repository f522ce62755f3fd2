// One streamed answer: its tokens, coloured by source, and what drafting did for it.

import { element } from "./dom.js";
import { showDraft, hideDraft } from "./draft.js";

export const SOURCES = ["context", "model", "statistics", "recycled", "other"];

export class Answer {
  constructor(label) {
    this.text = "";
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
    this.text += choice.delta.content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const step = { tokens: choice.token_sources ?? [], draft: choice.draft ?? [] };
    if (step.tokens.length) {
      this.steps.push(step);
      this.element.append(this.#stepElement(step, this.steps.length));
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

  // One element a step and one a token: only one step is in the tab order, arrows move between them.
  #stepElement(step, index) {
    const numAccepted = count(step);
    const made = element("span", {
      class: "step",
      tabindex: index === 1 ? "0" : "-1",
      onmouseenter: () => showDraft(made, step, index),
      onmouseleave: hideDraft,
      onfocus: () => showDraft(made, step, index),
      onblur: hideDraft,
    });
    made.dataset.accepted = numAccepted;
    for (const token of step.tokens) {
      if (token.text) made.append(element("span", { class: `token ${token.source}` }, token.text));
    }
    return made;
  }

  #move(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const steps = [...this.element.querySelectorAll(".step")];
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

function count(step) {
  return step.tokens.filter((token) => token.source !== "plain").length;
}
