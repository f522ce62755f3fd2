// A question and its answer, as they are shown and as they are sent.

import { element } from "./dom.js";

export class Turn {
  constructor(question) {
    this.question = question;
    this.answer = null; // once it is part of the conversation
    this.asked = element("div", { class: "asked" }, question);
    this.element = element("div", { class: "turn" }, this.asked);
  }

  show(answer) {
    this.element.replaceChildren(this.asked, ...answer.parts);
  }

  get messages() {
    const asked = { role: "user", content: this.question };
    if (!this.answer) return [asked];
    const { text, reasoning } = this.answer;
    return [asked, { role: "assistant", content: text, reasoning_content: reasoning || undefined }];
  }
}
