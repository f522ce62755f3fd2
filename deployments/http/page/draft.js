// The draft a step came with, as a tree beside it.

import { byId, element } from "./dom.js";

const MAX_SHOWN = 40;

export function showDraft(anchor, step) {
  const popover = byId("popover");
  const numAccepted = step.draft.filter((node) => node.accepted).length;
  const tokens = `${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"}`;
  const told = step.draft.length
    ? `Step ${step.number}: ${numAccepted} of ${step.draft.length} guesses accepted, ${tokens} from one forward pass.`
    : `Step ${step.number}: no guesses, ${tokens} from one forward pass.`;
  hideDraft();
  popover.replaceChildren(element("p", {}, told));
  if (step.draft.length) popover.append(tree(step.draft));
  popover.hidden = false;
  anchor.setAttribute("aria-describedby", "popover");
  place();
}

export function hideDraft() {
  byId("popover").hidden = true;
  shownAt()?.removeAttribute("aria-describedby");
}

// Escape closes it wherever the focus is, and it moves with its step.
export function watchDraft() {
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideDraft());
  document.addEventListener("scroll", place, { passive: true });
}

const shownAt = () => document.querySelector('[aria-describedby="popover"]');

function place() {
  const at = shownAt()?.getClientRects()[0];
  if (!at) return;
  const popover = byId("popover");
  const box = popover.getBoundingClientRect();
  const below = at.bottom + 8;
  const top = below + box.height < innerHeight ? below : Math.max(8, at.top - box.height - 8);
  popover.style.top = `${top}px`;
  popover.style.left = `${Math.max(16, Math.min(at.left, innerWidth - box.width - 16))}px`;
}

// A path without forks is one line; each fork begins lines of its own.
function tree(draft) {
  const list = element("ul", { class: "tree" });
  const children = new Map();
  draft.forEach((node, index) => {
    children.set(node.parent, [...(children.get(node.parent) ?? []), index]);
  });
  let numShown = 0;
  const visit = (index, depth) => {
    if (numShown >= MAX_SHOWN) return;
    const path = [];
    let next = [index];
    while (next.length === 1 && numShown < MAX_SHOWN) {
      path.push(draft[next[0]]);
      numShown += 1;
      next = children.get(next[0]) ?? [];
    }
    list.append(element("li", {}, element("span", { class: "branch" }, `${"  ".repeat(depth)}└ `), ...guesses(path)));
    for (const child of next) visit(child, depth + 1);
  };
  for (const root of children.get(-1) ?? []) visit(root, 0);
  if (draft.length > numShown) list.append(element("li", { class: "branch" }, `${draft.length - numShown} more`));
  return list;
}

// Those of one source that were accepted, or were not, are followed by its name.
function guesses(path) {
  return path.flatMap((node, index) => {
    const name = named(node);
    const made = element("span", { class: `guess ${node.source} ${node.accepted ? "accepted" : "refused"}` }, visible(node.text));
    const isLast = !path[index + 1] || named(path[index + 1]) !== name;
    return isLast ? [made, element("span", { class: "branch" }, ` ${name} `)] : [made];
  });
}

const named = ({ source, accepted }) => (accepted ? `${source}, accepted` : source);

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
