// Replicas and databases, from /v1/models and /metrics.

import { ApiError, getJson, getText, parseMetrics } from "./api.js";
import { bytes, byId, element, number } from "./dom.js";

const INTERVAL_MS = 2000;
const NAMES = { model: "model", other_models: "model, of others", statistics: "statistics", recycled: "recycled", context: "context" };

export class Cluster {
  constructor({ say, fail }) {
    this.say = say;
    this.fail = fail;
    this.timer = null;
    this.current = null; // the refresh under way
    this.hasFailed = false;
  }

  show(isShown) {
    clearInterval(this.timer);
    this.timer = null;
    this.current = null; // one that was begun with another key says nothing any more
    if (!isShown) return;
    this.#refresh();
    this.timer = setInterval(() => document.hidden || this.current || this.#refresh(), INTERVAL_MS);
  }

  async #refresh() {
    const own = {};
    this.current = own;
    try {
      const [{ data }, text] = await Promise.all([getJson("v1/models"), getText("metrics")]);
      const series = parseMetrics(text);
      const roots = [...new Set(data.map((model) => model.root))];
      const infos = await Promise.all(roots.map((name) => getJson(`v1/models/${encodeURI(name)}`).catch(() => null)));
      if (this.current !== own) return;
      const tops = [...document.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
      byId("cluster").replaceChildren(
        ...roots.map((name, index) => card(name, infos[index], series.filter((item) => item.labels.model_name === name))),
      );
      document.querySelectorAll(".scroll").forEach((part, index) => (part.scrollLeft = tops[index] ?? 0));
      if (this.hasFailed) this.say("");
      this.hasFailed = false;
    } catch (error) {
      if (this.current !== own) return;
      // Without a key nothing changes until there is one; a server that restarts comes back.
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) this.show(false);
      this.hasFailed = true;
      this.fail(error);
    } finally {
      if (this.current === own) this.current = null;
    }
  }
}

function card(name, info, series) {
  const about = info
    ? `${info.dtype} on ${info.device}, context of ${number(info.max_model_len)} tokens, weights of ${bytes(info.weight_bytes)}, drafts by ${info.drafters.join(", ") || "nobody"}`
    : "no replica answers";
  return element(
    "article",
    { class: "served" },
    element("h2", {}, name),
    element("p", { class: "note" }, about),
    databases(name, series),
    replicas(name, series),
  );
}

function databases(name, series) {
  // Every replica has a copy, so sizes are those of the largest and counts are of all together.
  const largest = (metric, labels = {}) => Math.max(...values(series, metric, labels), -Infinity);
  const total = (metric, labels) => values(series, metric, labels).reduce((sum, value) => sum + value, 0);
  const age = largest("hdserve_mirror_age_seconds");
  const rows = Object.keys(NAMES)
    .filter((database) => database !== "other_models" || largest("hdserve_database_entries", { database }) >= 0)
    .map((database) => {
      const drafted = total("hdserve_draft_tokens_total", { source: database });
      const accepted = total("hdserve_accepted_tokens_total", { source: database });
      const size = largest("hdserve_database_bytes", { database });
      const isOwn = database !== "other_models";
      return [
        [element("span", { class: `swatch ${isOwn ? database : "model"}-fill` }), NAMES[database]],
        number(largest("hdserve_database_entries", { database })),
        size >= 0 ? bytes(size) : "–",
        isOwn ? number(drafted) : "–",
        isOwn ? number(accepted) : "–",
        isOwn && drafted ? `${number((100 * accepted) / drafted, 1)} %` : "–",
        database === "model" && age >= 0 ? `${number(age, 1)} s` : "–",
      ];
    });
  const heads = ["Database", "Entries", "Size", "Guesses", "Accepted", "Hit rate", "Age of the copy"];
  return table(`Databases of ${name}`, heads, rows);
}

function replicas(name, series) {
  const ids = [...new Set(series.filter((item) => item.name === "hdserve_slots").map((item) => item.labels.engine))];
  const rows = ids.map((engine) => {
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
  const made = element(
    "table",
    { role: "table" },
    element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, head),
    element("tbody", { role: "rowgroup" }, ...body),
  );
  return element("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, made);
}
