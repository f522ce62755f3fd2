// The same prompt with and without drafts, at the same time.

import { getJson, streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { byId, element, number } from "./dom.js";
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
    this.answer = new Answer(this.title);
    this.place.replaceChildren(this.answer.element);
    try {
      for await (const chunk of streamChat({ ...body, speculation: this.speculation }, signal)) {
        this.answer.add(chunk);
        this.meter.show(this.answer);
      }
    } finally {
      this.answer.end();
    }
  }
}

export class Race {
  constructor({ model, say, fail }) {
    Object.assign(this, { model, say, fail });
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
    const body = {
      model: this.model(),
      messages: [{ role: "user", content: text }],
      temperature: byId("temperature").valueAsNumber || 0,
      max_tokens: byId("max-tokens").valueAsNumber || undefined,
      seed: byId("seed").valueAsNumber || 0,
    };
    const ends = await Promise.allSettled(this.lanes.map((lane) => lane.run(body, controller.signal)));
    const failed = ends.find((end) => end.status === "rejected");
    if (!failed) byId("verdict").textContent = await this.#verdict(body.model);
    else if (controller.signal.aborted) this.say("Stopped");
    else this.fail(failed.reason);
    this.controller = null;
    this.#showState();
  }

  async #verdict(model) {
    const [drafted, plain] = this.lanes.map((lane) => lane.answer);
    if (drafted.text !== plain.text || drafted.reasoning !== plain.reasoning) return differing(await getJson(`v1/models/${encodeURI(model)}`).catch(() => ({})));
    const passes = `${number(drafted.steps.length)} forward passes instead of ${number(plain.steps.length)}`;
    const times = `${number(drafted.seconds, 2)} s and ${number(plain.seconds, 2)} s`;
    return `The same text, ${number(plain.numTokens)} tokens: ${passes}; ${times}.`;
  }

  #showState() {
    byId("race-start").hidden = this.controller !== null;
    byId("race-stop").hidden = this.controller === null;
  }
}

// What is told when drafts did change the text.
function differing({ is_exact: isExact, dtype }) {
  if (isExact !== false) return "The texts differ. That must not happen: please report it.";
  return `The texts differ: in ${dtype} a near-tie between two tokens was rounded the other way. With engine.exact: true the model takes no such turns.`;
}
