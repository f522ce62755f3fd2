// The frame: views, the model, the key, the theme.

import { key } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { byId } from "./dom.js";
import { watchDraft } from "./draft.js";
import { Models } from "./models.js";
import { Race } from "./race.js";
import { Kept } from "./storage.js";

const THEMES = ["auto", "light", "dark"];

function say(text, { isBad = false } = {}) {
  if (byId("status").textContent !== text) byId("status").textContent = text;
  byId("status").classList.toggle("is-bad", isBad);
}

function fail(error) {
  if (error.isOfKey && error.key !== key.get()) return say(""); // there is another key by now
  say(error.message, { isBad: true });
  if (error.isOfKey) askForKey(error.message);
}

// What a request for an answer failed with: the model may be gone.
function failToAsk(error) {
  fail(error);
  if (error.status === 404) models.load().catch(fail);
}

// ---- the key ----

function askForKey(reason) {
  byId("key-reason").textContent = reason ?? "";
  if (byId("key-dialog").open) return;
  byId("key").value = key.get();
  byId("key-dialog").showModal();
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
  const value = byId("key").value.trim();
  if (/^[\x21-\x7e]*$/.test(value)) useKey(value);
  else askForKey("A key has only letters, digits and signs of ASCII: something else was pasted with it.");
});
if (key.get()) byId("key-button").textContent = "Key ✓";

// ---- the theme ----

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = `Theme: ${theme}`;
}

const keptTheme = new Kept(() => localStorage, "hdserve-theme");
let theme = THEMES.includes(keptTheme.get()) ? keptTheme.get() : "auto";
showTheme(theme);
byId("theme-button").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  keptTheme.set(theme);
  showTheme(theme);
});

// ---- the model ----

const models = new Models();

async function loadModels() {
  try {
    await models.load();
    say("");
  } catch (error) {
    fail(error);
  }
}

// ---- the views ----

const tools = { models, say, fail: failToAsk };
const cluster = new Cluster(fail);
new Chat(tools);
new Race(tools);
watchDraft();

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

const named = () => tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
addEventListener("hashchange", () => named() && show(named()));
show(named() ?? tabs[0]);
loadModels();
