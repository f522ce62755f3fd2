// What there is to see of one model: what a replica says of itself, the databases, the replicas.

import { describe } from "./api.js";
import { bytes, element, number } from "./dom.js";

const NAMES = { model: "model", other_models: "model, of others", statistics: "statistics", recycled: "recycled", context: "context", other: "other", grammar: "grammar" };
const RARE = ["other_models", "other", "grammar"]; // not shown before they were of use
const COPIED = ["model", "other_models", "statistics"]; // every replica has the same

export class Card {
  constructor(name) {
    this.name = name;
    this.described = null; // the replicas of which one was asked
    this.note = element("p", { class: "note" });
    this.places = [`Databases of ${name}`, `Replicas of ${name}`].map((label) =>
      element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0", hidden: true }),
    );
    this.element = element("article", { class: "served" }, element("h2", {}, name), this.note, ...this.places);
  }

  // The regions stay, and with them their focus; without series nothing is known.
  show(series) {
    for (const place of this.places) place.hidden = !series;
    if (!series) return;
    const engines = enginesOf(series);
    const tables = [databases(this.name, series), replicas(this.name, series, engines)];
    tables.forEach((made, index) => this.places[index].replaceChildren(made));
    this.#describe(engines);
  }

  // A replica is asked once for each set of them; where there is none, to ask would start one.
  async #describe(engines) {
    const asked = engines.join();
    if (this.described === asked) return;
    this.described = asked;
    try {
      const told = asked ? sentence(await describe(this.name)) : "no replica runs";
      if (this.described === asked) this.note.textContent = told;
    } catch {
      this.note.textContent = "no replica answers";
      this.described = null;
    }
  }
}

function sentence(info) {
  return `${info.dtype} on ${info.device}, context of ${number(info.max_model_len)} tokens, weights of ${bytes(info.weight_bytes)}, drafts by ${info.drafters.join(", ") || "nobody"}`;
}

function databases(name, series) {
  // What is copied counts once; what each replica has of its own, and all counts, are of all together.
  const largest = (metric, labels = {}) => Math.max(...values(series, metric, labels), -Infinity);
  const total = (metric, labels) => values(series, metric, labels).reduce((sum, value) => sum + value, 0);
  const held = (metric, database) => (COPIED.includes(database) ? largest : total)(metric, { database });
  const isThere = (database) => values(series, "hdserve_database_entries", { database }).length > 0;
  const drafted = (source) => total("hdserve_draft_tokens_total", { source });
  const age = largest("hdserve_mirror_age_seconds");
  const rows = Object.keys(NAMES)
    .filter((database) => !RARE.includes(database) || isThere(database) || drafted(database))
    .map((database) => {
      const numDrafted = drafted(database);
      const numAccepted = total("hdserve_accepted_tokens_total", { source: database });
      const isOwn = database !== "other_models";
      return [
        [element("span", { class: `swatch ${isOwn ? database : "model"}-fill` }), NAMES[database]],
        isThere(database) ? number(held("hdserve_database_entries", database)) : "–",
        isThere(database) ? bytes(held("hdserve_database_bytes", database)) : "–",
        isOwn ? number(numDrafted) : "–",
        isOwn ? number(numAccepted) : "–",
        isOwn && numDrafted ? `${number((100 * numAccepted) / numDrafted, 1)} %` : "–",
        database === "model" && age >= 0 ? `${number(age, 1)} s` : "–",
      ];
    });
  const heads = ["Database", "Entries", "Size", "Guesses", "Accepted", "Hit rate", "Age of the copy"];
  return table(`Databases of ${name}`, heads, rows);
}

function enginesOf(series) {
  return [...new Set(series.filter((item) => item.name === "hdserve_slots").map((item) => item.labels.engine))].sort();
}

function replicas(name, series, engines) {
  const rows = engines.map((engine) => {
    const one = (metric) => values(series, metric, { engine })[0] ?? NaN;
    const drafts = one("vllm:spec_decode_num_drafts_total");
    return [
      [engine],
      `${number(one("vllm:num_requests_running"))} of ${number(one("hdserve_slots"))}`,
      number(one("vllm:num_requests_waiting")),
      `${number(100 * one("vllm:kv_cache_usage_perc"), 1)} %`,
      number(one("vllm:generation_tokens_total")),
      number(drafts ? 1 + one("vllm:spec_decode_num_accepted_tokens_total") / drafts : NaN, 2),
    ];
  });
  const heads = ["Replica", "Running", "Waiting", "KV cache", "Tokens generated", "Mean acceptance length"];
  return table(`Replicas of ${name}`, heads, rows);
}

function values(series, metric, labels) {
  const wanted = Object.entries(labels);
  return series
    .filter((item) => item.name === metric && wanted.every(([name, value]) => item.labels[name] === value))
    .map((item) => item.value);
}

// Where it is narrow each row stands by itself, its cells with their heads; the roles stay.
function table(caption, heads, rows) {
  const head = element("tr", { role: "row" }, ...heads.map((text) => element("th", { scope: "col", role: "columnheader" }, text)));
  const body = rows.map(([first, ...rest]) =>
    element(
      "tr",
      { role: "row" },
      element("th", { scope: "row", role: "rowheader" }, ...first),
      ...rest.map((text, index) => element("td", { role: "cell", "data-head": heads[index + 1] }, text)),
    ),
  );
  return element(
    "table",
    { role: "table" },
    element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, head),
    element("tbody", { role: "rowgroup" }, ...body),
  );
}
