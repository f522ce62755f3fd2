// Replicas and databases, from /v1/models and /metrics.

import { getJson, getText, parseMetrics } from "./api.js";
import { Card } from "./card.js";
import { byId } from "./dom.js";

const INTERVAL_MS = 2000;

export class Cluster {
  constructor(fail) {
    this.fail = fail;
    this.timer = null;
    this.current = null; // the refresh under way
    this.cards = new Map(); // by the names of the models
  }

  show(isShown) {
    clearInterval(this.timer);
    this.timer = null;
    this.current = null; // one that was begun with another key says nothing any more
    this.#tell("");
    if (!isShown) return;
    this.#refresh();
    this.timer = setInterval(() => document.hidden || this.current || this.#refresh(), INTERVAL_MS);
  }

  async #refresh() {
    const own = {};
    this.current = own;
    try {
      const [{ data }, { series, fault }] = await Promise.all([getJson("v1/models"), readMetrics()]);
      if (this.current !== own) return;
      this.#draw([...new Set(data.map((model) => model.root))], series);
      this.#tell(fault ? `GET /metrics has no figures of databases and replicas: ${fault.message}` : "");
    } catch (error) {
      if (this.current !== own) return;
      if (!error.isOfKey) return this.#tell(error.message); // a server that restarts comes back
      this.show(false); // nothing changes until there is another key
      this.fail(error);
    } finally {
      if (this.current === own) this.current = null;
    }
  }

  #draw(names, series) {
    if (names.join() !== [...this.cards.keys()].join()) {
      this.cards = new Map(names.map((name) => [name, this.cards.get(name) ?? new Card(name)]));
      byId("cluster").replaceChildren(...[...this.cards.values()].map((card) => card.element));
    }
    for (const [name, card] of this.cards) card.show(series?.filter((item) => item.labels.model_name === name));
  }

  #tell(text) {
    if (byId("cluster-fault").textContent !== text) byId("cluster-fault").textContent = text;
  }
}

// A proxy may not pass them.
const readMetrics = () =>
  getText("metrics").then(
    (text) => ({ series: parseMetrics(text) }),
    (fault) => ({ fault }),
  );
