// The conversation.

import { streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { byId, element, number } from "./dom.js";
import { Meter } from "./meter.js";

const EXAMPLES = [
  "I want to book a table for two in San Jose.",
  "Is there a train to Cambridge on Monday?",
  "Say it, and say it again: a table for two.",
];

export class Chat {
  constructor({ model, say, fail }) {
    Object.assign(this, { model, say, fail });
    this.messages = []; // {role, content, reasoning_content}
    this.controller = null;
    this.meter = new Meter();
    this.meterElement = byId("chat-meter");
    this.meterElement.append(...this.meter.parts);
    for (const text of EXAMPLES) {
      byId("examples").append(element("button", { type: "button", onclick: () => this.ask(text) }, text));
    }
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(byId("prompt").value.trim());
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.controller?.abort());
    byId("again").addEventListener("click", () => this.regenerate());
    byId("clear").addEventListener("click", () => this.clear());
  }

  ask(text) {
    if (!text || this.controller) return;
    byId("prompt").value = "";
    byId("hello").hidden = true;
    this.messages.push({ role: "user", content: text });
    this.lastAsked = element("div", { class: "asked" }, text);
    byId("turns").append(this.lastAsked);
    this.#answer();
  }

  regenerate() {
    if (this.controller || this.messages.at(-1)?.role !== "assistant") return;
    this.messages.pop();
    for (const part of this.lastParts) part.remove();
    byId("seed").stepUp();
    this.#answer();
  }

  clear() {
    this.controller?.abort();
    this.messages = [];
    byId("turns").replaceChildren(byId("hello"));
    byId("hello").hidden = false;
    this.meter.show(null);
    this.#showState();
    byId("prompt").focus();
  }

  async #answer() {
    const answer = new Answer("Answer");
    const end = element("p", { class: "answer-end" });
    this.lastParts = [answer.element, end];
    byId("turns").append(answer.element, end);
    const controller = new AbortController();
    this.controller = controller;
    this.#showState();
    this.say("Answering");
    let how = "";
    try {
      for await (const chunk of streamChat(this.#body(), controller.signal)) {
        answer.add(chunk);
        this.meter.show(answer);
        end.scrollIntoView({ block: "nearest" });
      }
      how = answer.finishReason === "length" ? ", cut at the limit" : "";
      this.say(`Answered: ${number(answer.numTokens)} tokens`);
    } catch (error) {
      if (controller.signal.aborted) {
        how = ", stopped";
        this.say("Stopped");
      } else {
        how = ", failed";
        this.fail(error);
      }
    }
    answer.end();
    end.textContent = `${number(answer.numTokens)} tokens in ${number(answer.steps.length)} forward passes, ${number(answer.seconds, 1)} s${how}`;
    if (this.controller !== controller) return;
    this.controller = null;
    if (how && !answer.steps.length) this.#takeBack();
    else if (this.messages.length) this.messages.push({ role: "assistant", content: answer.text, reasoning_content: answer.reasoning || undefined });
    this.#showState();
  }

  // A question that was refused is in the field again, and no part of the conversation.
  #takeBack() {
    const asked = this.messages.pop();
    if (!asked) return;
    for (const part of [this.lastAsked, ...this.lastParts]) part.remove();
    byId("prompt").value ||= asked.content;
    byId("hello").hidden = this.messages.length > 0;
  }

  #body() {
    const system = byId("system").value.trim();
    const boxes = [...document.querySelectorAll("[name=database]")];
    const databases = boxes.filter((box) => box.checked).map((box) => box.value);
    return {
      model: this.model(),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: byId("temperature").valueAsNumber || 0,
      max_tokens: byId("max-tokens").valueAsNumber || undefined,
      seed: byId("seed").valueAsNumber || 0,
      speculation: databases.length < boxes.length ? { databases, enabled: databases.length > 0 } : undefined,
    };
  }

  #showState() {
    const isBusy = this.controller !== null;
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("again").disabled = isBusy || this.messages.at(-1)?.role !== "assistant";
    byId("clear").disabled = this.messages.length === 0;
  }
}
