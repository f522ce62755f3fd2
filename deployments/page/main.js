// The frame: views, the model, the key, the theme.

import { ApiError, getJson, key } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { byId, element } from "./dom.js";
import { Race } from "./race.js";

const THEMES = ["auto", "light", "dark"];

function say(text, { isBad = false } = {}) {
  byId("status").textContent = text;
  byId("status").classList.toggle("is-bad", isBad);
}

function fail(error) {
  say(error.message, { isBad: true });
  if (error instanceof ApiError && (error.status === 401 || error.status === 403)) askForKey(error.message);
}

// ---- the key ----

function askForKey(reason) {
  if (reason) byId("key-reason").textContent = reason;
  byId("key").value = key.get();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function useKey(value) {
  key.set(value);
  byId("key-dialog").close();
  byId("key-button").textContent = value ? "Key ✓" : "Key";
  loadModels();
  cluster.show(byId("tab-databases").getAttribute("aria-selected") === "true");
}

byId("key-button").addEventListener("click", () => askForKey());
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
});
if (key.get()) byId("key-button").textContent = "Key ✓";

// ---- the theme ----

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = `Theme: ${theme}`;
}

let theme = THEMES.includes(localStorage.getItem("hdserve-theme")) ? localStorage.getItem("hdserve-theme") : "auto";
showTheme(theme);
byId("theme-button").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("hdserve-theme", theme);
  showTheme(theme);
});

// ---- the model ----

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    const chosen = byId("model").value;
    byId("model").replaceChildren(...data.map((model) => element("option", { value: model.id }, model.id)));
    if (data.some((model) => model.id === chosen)) byId("model").value = chosen;
    say("");
  } catch (error) {
    fail(error);
  }
}

// ---- the views ----

const tools = { model: () => byId("model").value, say, fail };
const cluster = new Cluster(tools);
new Chat(tools);
new Race(tools);

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const isShown = other === tab;
    other.setAttribute("aria-selected", String(isShown));
    other.tabIndex = isShown ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isShown;
  }
  cluster.show(tab.id === "tab-databases");
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}

show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
loadModels();
