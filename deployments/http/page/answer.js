// One streamed answer: its tokens, coloured by source, and what drafting did for it.

import { element } from "./dom.js";
import { showDraft, hideDraft } from "./draft.js";

export const SOURCES = ["context", "model", "statistics", "recycled", "other", "grammar"];

export class Answer {
  constructor(label) {
    this.text = "";
    this.reasoning = "";
    this.isThinking = false; // whether reasoning came last
    this.steps = []; // [{number, tokens: [{text, source}], draft: [...]}]
    this.unplaced = []; // steps of which nobody knows yet whether they are reasoning
    this.undrawn = []; // [{step, thought, said}]
    this.numTokens = 0;
    this.numDrafts = 0;
    this.numDraftedTokens = 0;
    this.drafting = null;
    this.acceptedBySource = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    this.finishReason = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.reasoningElement = null;
    this.element = element("div", { class: "answer", role: "group", "aria-label": label, "aria-busy": "true" });
    this.element.addEventListener("keydown", (event) => this.#move(event));
    this.told = element("p", { class: "answer-end" });
    this.parts = [this.element, this.told];
  }

  add(chunk) {
    this.drafting = chunk.metrics?.speculative_decoding ?? this.drafting; // comes at the end
    const choice = chunk.choices[0];
    if (!choice || choice.delta.role) return; // the role comes alone
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    const content = choice.delta.content ?? "";
    const thought = choice.delta.reasoning_content ?? "";
    const hadText = this.text !== "";
    const isBehindMarks = this.unplaced.length > 0;
    this.text += content;
    this.reasoning += thought;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (choice.token_sources?.length) this.#count(choice.token_sources, choice.draft ?? []);
    if (this.reasoning ? content || thought : this.text) {
      const isText = hadText && !thought && !this.isThinking && !isBehindMarks;
      this.#place(isText ? Infinity : content.length);
      this.isThinking = !content;
    }
  }

  // Shows what has come since the last time.
  draw() {
    for (const { step, thought, said } of this.undrawn.splice(0)) {
      if (thought.length) this.#addStep(this.#reasoningElement(), step, thought);
      if (said.length) this.#addStep(this.element, step, said);
    }
  }

  end(told) {
    this.#place(Infinity);
    this.draw();
    this.element.setAttribute("aria-busy", "false");
    this.told.textContent = told;
  }

  // Tokens after the first step over the time since it: what the reader sees. An answer that came
  // all at once counts from its request.
  get tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const first = this.steps[0]?.tokens.length ?? 0;
    if (seconds > 0) return (this.numTokens - first) / seconds;
    return this.finishReason ? this.numTokens / this.seconds : NaN;
  }

  get seconds() {
    return ((this.lastMs ?? performance.now()) - this.startedMs) / 1000;
  }

  // Tokens per verified draft: the one the model adds to each counts. The server may show only drafts that were
  // accepted, but counts all.
  get meanAcceptanceLength() {
    return this.drafting?.num_spec_steps ? this.drafting.mean_acceptance_length : this.numDraftedTokens / this.numDrafts;
  }

  #count(tokens, draft) {
    const step = { number: this.steps.length + 1, tokens, draft };
    this.steps.push(step);
    this.unplaced.push(step);
    this.numTokens += tokens.length;
    for (const { source } of tokens) if (source in this.acceptedBySource) this.acceptedBySource[source] += 1;
    if (!draft.length) return;
    this.numDrafts += 1;
    this.numDraftedTokens += tokens.length;
  }

  // The tokens of the last `numSaid` characters are the answer's; those before, marks included, are reasoning, or
  // where there is none, marks that are not shown.
  #place(numSaid) {
    const steps = this.unplaced.splice(0);
    const length = steps.reduce((sum, { tokens }) => tokens.reduce((part, { text }) => part + text.length, sum), 0);
    let numThought = numSaid ? length - numSaid : Infinity;
    for (const step of steps) {
      const thought = [];
      const said = [];
      for (const token of step.tokens) {
        const isThought = numThought > 0 && token.text.length <= numThought;
        numThought = isThought ? numThought - token.text.length : 0;
        (isThought ? thought : said).push(token);
      }
      this.undrawn.push({ step, thought: this.reasoning ? thought : [], said });
    }
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
    const made = element("span", {
      class: "step",
      tabindex: block.lastElementChild?.matches(".step") ? "-1" : "0",
      onmouseenter: () => showDraft(made, step),
      onmouseleave: hideDraft,
      onfocus: () => showDraft(made, step),
      onblur: hideDraft,
    });
    made.dataset.accepted = step.tokens.filter((token) => token.source !== "plain").length;
    for (const token of tokens) {
      if (token.text) made.append(element("span", { class: `token ${token.source}` }, token.text));
    }
    block.append(made);
  }

  #move(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const steps = [...this.element.querySelectorAll(":scope > .step, [open] > .step")];
    const at = steps.indexOf(document.activeElement);
    if (at < 0 || !(event.key in moves)) return;
    event.preventDefault();
    const next = steps[Math.min(steps.length - 1, Math.max(0, at + moves[event.key]))];
    next.parentElement.querySelector(':scope > .step[tabindex="0"]').tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
