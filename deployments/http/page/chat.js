// The conversation.

import { streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { byId, eachFrame, element, number, swap } from "./dom.js";
import { Meter } from "./meter.js";
import { Turn } from "./turn.js";

const EXAMPLES = [
  "I want to book a table for two in San Jose.",
  "Is there a train to Cambridge on Monday?",
  "Say it, and say it again: a table for two.",
];

export class Chat {
  constructor({ models, say, fail }) {
    Object.assign(this, { models, say, fail });
    this.turns = [];
    this.controller = null;
    this.meter = new Meter();
    byId("chat-meter").append(...this.meter.parts);
    for (const text of EXAMPLES) {
      byId("examples").append(element("button", { type: "button", onclick: () => this.ask(text) }, text));
    }
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = byId("prompt").value.trim();
      if (!text || this.controller) return;
      byId("prompt").value = "";
      this.ask(text);
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.controller?.abort());
    byId("again").addEventListener("click", () => this.regenerate());
    byId("clear").addEventListener("click", () => this.clear());
  }

  ask(text) {
    if (this.controller) return;
    const turn = new Turn(text);
    this.turns.push(turn);
    byId("turns").append(turn.element);
    this.#answer(turn);
  }

  regenerate() {
    if (this.controller || !this.turns.length) return;
    byId("seed").stepUp();
    this.#answer(this.turns.at(-1));
  }

  clear() {
    this.controller?.abort();
    this.controller = null;
    this.turns = [];
    byId("turns").replaceChildren(byId("hello"));
    this.meter.show(null);
    this.say("");
    this.#showState();
    byId("prompt").focus();
  }

  async #answer(turn) {
    const former = turn.answer;
    const answer = new Answer("Answer");
    const controller = new AbortController();
    this.controller = controller;
    turn.answer = null;
    turn.show(answer);
    this.meter.show(answer);
    this.#showState();
    this.say("Answering");
    answer.told.scrollIntoView({ block: "nearest" });
    const draw = eachFrame(() => this.controller === controller && this.#draw(answer));
    let fault = null;
    try {
      for await (const chunk of streamChat(await this.#body(), controller.signal)) {
        answer.add(chunk);
        draw();
      }
    } catch (error) {
      fault = error;
    }
    if (this.controller !== controller) return; // there is a new chat
    this.controller = null;
    answer.end(told(answer, fault, controller.signal));
    this.#draw(answer);
    if (fault && !answer.steps.length) this.#takeBack(turn, former);
    else turn.answer = answer;
    this.#showState();
    if (!fault) this.say(`Answered: ${number(answer.numTokens)} tokens`);
    else if (controller.signal.aborted) this.say("Stopped");
    else this.fail(fault);
  }

  // Shows what has come; whoever reads the end goes on reading it.
  #draw(answer) {
    const { top, bottom } = answer.told.getBoundingClientRect();
    answer.draw();
    this.meter.show(answer);
    if (bottom > 0 && top < innerHeight) answer.told.scrollIntoView({ block: "nearest" });
  }

  // What was refused leaves no trace: the former answer is there again, or the question is in the field.
  #takeBack(turn, former) {
    if (former) {
      turn.answer = former;
      turn.show(former);
    } else {
      this.turns.pop();
      turn.element.remove();
      const prompt = byId("prompt");
      if (prompt.value) prompt.setRangeText(`${turn.question}\n\n`, 0, 0);
      else prompt.value = turn.question;
    }
    this.meter.show(this.turns.at(-1)?.answer ?? null);
  }

  async #body() {
    const system = byId("system").value.trim();
    const boxes = [...document.querySelectorAll("[name=database]")];
    const databases = boxes.filter((box) => box.checked).map((box) => box.value);
    return {
      model: await this.models.chosen(),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns.flatMap((turn) => turn.messages)],
      temperature: byId("temperature").valueAsNumber || 0,
      max_tokens: byId("max-tokens").valueAsNumber || undefined,
      seed: byId("seed").valueAsNumber || 0,
      speculation: databases.length < boxes.length ? { databases, enabled: databases.length > 0 } : undefined,
    };
  }

  #showState() {
    const isBusy = this.controller !== null;
    const { activeElement } = document;
    if (isBusy) swap(byId("send"), byId("stop"));
    else swap(byId("stop"), byId("send"));
    if (isBusy && activeElement?.closest("#again, #hello")) byId("stop").focus();
    byId("hello").hidden = this.turns.length > 0;
    byId("again").disabled = isBusy || !this.turns.length;
    byId("clear").disabled = !this.turns.length;
  }
}

// What stands at the end of an answer.
function told(answer, fault, signal) {
  const passes = `${number(answer.numTokens)} tokens in ${number(answer.steps.length)} forward passes, ${number(answer.seconds, 1)} s`;
  if (fault) return `${passes}, ${signal.aborted ? "stopped" : `failed: ${fault.message}`}`;
  return answer.finishReason === "length" ? `${passes}, cut at the limit` : passes;
}

// Safari has ended the composition by the time of the Enter that confirms it, and says so by this code alone.
const isComposing = (event) => event.isComposing || event.keyCode === 229;
