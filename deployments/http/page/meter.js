// Numbers and charts of one answer, live.

import { SOURCES } from "./answer.js";
import { element, number, svg } from "./dom.js";

const MAX_BARS = 80;

export class Meter {
  constructor({ withTrace = true } = {}) {
    this.dials = {
      speed: element("dd", {}, "–"),
      acceptance: element("dd", {}, "–"),
      tokens: element("dd", {}, "0"),
      steps: element("dd", {}, "0"),
    };
    const dial = (value, label) => element("div", {}, element("dt", {}, label), value);
    this.trace = svg("svg", { class: "trace", preserveAspectRatio: "none", role: "img" });
    this.share = element("div", { class: "share", "aria-hidden": "true" });
    this.list = element("ul", { class: "sources" });
    this.parts = [
      element(
        "dl",
        { class: "dials" },
        dial(this.dials.speed, "tokens per second"),
        dial(this.dials.acceptance, "mean acceptance length"),
        dial(this.dials.tokens, "tokens"),
        dial(this.dials.steps, "forward passes"),
      ),
      element("div", { hidden: !withTrace }, element("h3", {}, "Tokens per forward pass"), this.trace),
      element("div", {}, element("h3", {}, "Accepted by source"), this.share, this.list),
    ];
    this.show(null);
  }

  show(answer) {
    this.dials.speed.textContent = number(answer?.tokensPerSecond ?? NaN, 1);
    this.dials.acceptance.textContent = number(answer?.meanAcceptanceLength ?? NaN, 2);
    this.dials.tokens.textContent = number(answer?.numTokens ?? 0);
    this.dials.steps.textContent = number(answer?.steps.length ?? 0);
    this.#showTrace(answer?.steps ?? []);
    this.#showSources(answer?.acceptedBySource ?? {}, answer?.numTokens ?? 0);
  }

  #showTrace(steps) {
    const shown = steps.slice(-MAX_BARS);
    const height = Math.max(4, ...shown.map((step) => step.tokens.length));
    this.trace.setAttribute("viewBox", `0 0 ${Math.max(24, shown.length)} ${height}`);
    this.trace.setAttribute("aria-label", `Tokens of the last ${shown.length} forward passes, by source`);
    const bars = shown.flatMap((step, x) =>
      step.tokens.map((token, y) =>
        svg("rect", { class: `${token.source}-fill`, x: x + 0.1, y: height - y - 0.95, width: 0.8, height: 0.9 }),
      ),
    );
    this.trace.replaceChildren(...bars);
  }

  #showSources(accepted, numTokens) {
    const shown = SOURCES.filter((source, index) => index < 3 || accepted[source]);
    const numPlain = numTokens - SOURCES.reduce((sum, source) => sum + (accepted[source] ?? 0), 0);
    const rows = [...shown.map((source) => [source, accepted[source] ?? 0]), ["plain", numPlain]];
    this.share.replaceChildren(
      ...rows.map(([source, count]) => {
        const part = element("span", { class: `${source}-fill` });
        part.style.flexGrow = count;
        return part;
      }),
    );
    this.list.replaceChildren(
      ...rows.map(([source, count]) =>
        element(
          "li",
          {},
          element("span", { class: `swatch ${source}-fill` }),
          source,
          element("span", { class: "count" }, number(count)),
        ),
      ),
    );
  }
}
