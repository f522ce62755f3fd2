// The same prompt with and without drafts, at the same time.

import { describe, streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { byId, eachFrame, element, number, swap } from "./dom.js";
import { Meter } from "./meter.js";

class Lane {
  constructor(id, title, speculation) {
    Object.assign(this, { title, speculation });
    this.meter = new Meter({ withTrace: false });
    this.place = element("div", {});
    byId(id).append(this.place, element("div", { class: "instruments" }, ...this.meter.parts));
    this.answer = null;
  }

  async run(body, signal) {
    const answer = new Answer(this.title);
    this.answer = answer;
    this.place.replaceChildren(...answer.parts);
    this.#draw();
    const draw = eachFrame(() => this.#draw());
    try {
      for await (const chunk of streamChat({ ...body, speculation: this.speculation }, signal)) {
        answer.add(chunk);
        draw();
      }
      answer.end("");
    } catch (error) {
      answer.end(signal.aborted ? "stopped" : `failed: ${error.message}`);
      throw error;
    } finally {
      this.#draw();
    }
  }

  #draw() {
    this.answer.draw();
    this.meter.show(this.answer);
  }
}

export class Race {
  constructor({ models, say, fail }) {
    Object.assign(this, { models, say, fail });
    this.controller = null;
    this.lanes = [
      new Lane("lane-drafts", "With drafts", { enabled: true, share_output: false }),
      new Lane("lane-plain", "Without drafts", { enabled: false, share_output: false }),
    ];
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start(byId("race-prompt").value.trim());
    });
    byId("race-stop").addEventListener("click", () => this.controller?.abort());
  }

  async start(text) {
    if (!text || this.controller) return;
    const controller = new AbortController();
    this.controller = controller;
    this.#showState();
    byId("verdict").textContent = "";
    this.say("Answering");
    try {
      byId("verdict").textContent = await this.#run(text, controller.signal);
      this.say("");
    } catch (error) {
      if (controller.signal.aborted) this.say("Stopped");
      else this.fail(error);
    }
    this.controller = null;
    this.#showState();
  }

  // What is told of two answers; throws what one of them was refused for, once both have ended.
  async #run(text, signal) {
    const body = {
      model: await this.models.chosen(),
      messages: [{ role: "user", content: text }],
      temperature: byId("temperature").valueAsNumber || 0,
      max_tokens: byId("max-tokens").valueAsNumber || undefined,
      seed: byId("seed").valueAsNumber || 0,
    };
    const ends = await Promise.allSettled(this.lanes.map((lane) => lane.run(body, signal)));
    for (const end of ends) if (end.status === "rejected") throw end.reason;
    return this.#verdict(body.model);
  }

  async #verdict(model) {
    const [drafted, plain] = this.lanes.map((lane) => lane.answer);
    if (drafted.text !== plain.text || drafted.reasoning !== plain.reasoning) {
      return describe(model).then(differing, ({ message }) => `The texts differ. Whether the model is exact is not known: ${message}`);
    }
    const passes = `${number(drafted.steps.length)} forward passes instead of ${number(plain.steps.length)}`;
    const times = `${number(drafted.seconds, 2)} s and ${number(plain.seconds, 2)} s`;
    return `The same text, ${number(plain.numTokens)} tokens: ${passes}; ${times}.`;
  }

  #showState() {
    if (this.controller) swap(byId("race-start"), byId("race-stop"));
    else swap(byId("race-stop"), byId("race-start"));
  }
}

// What is told when drafts did change the text.
function differing({ is_exact: isExact, dtype }) {
  if (isExact) return "The texts differ. That must not happen: please report it.";
  return `The texts differ: in ${dtype} a near-tie between two tokens was rounded the other way. With engine.exact: true the model takes no such turns.`;
}
