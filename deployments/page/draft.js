// The draft a step came with, as a tree beside it.

import { byId, element } from "./dom.js";

const MAX_SHOWN = 40;

export function showDraft(anchor, step, index) {
  const popover = byId("popover");
  const numAccepted = step.draft.filter((node) => node.accepted).length;
  const tokens = `${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"}`;
  const told = step.draft.length
    ? `Step ${index}: ${numAccepted} of ${step.draft.length} guesses accepted, ${tokens} from one forward pass.`
    : `Step ${index}: no guesses, ${tokens} from one forward pass.`;
  popover.replaceChildren(element("p", {}, told));
  if (step.draft.length) popover.append(tree(step.draft));
  popover.hidden = false;
  anchor.setAttribute("aria-describedby", "popover");
  place(popover, anchor);
}

export function hideDraft() {
  const popover = byId("popover");
  popover.hidden = true;
  document.querySelector('[aria-describedby="popover"]')?.removeAttribute("aria-describedby");
}

function place(popover, anchor) {
  const [at] = anchor.getClientRects();
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
    const line = element("li", {}, element("span", { class: "branch" }, `${"  ".repeat(depth)}└ `));
    list.append(line);
    let next = [index];
    while (next.length === 1 && numShown < MAX_SHOWN) {
      const node = draft[next[0]];
      const state = node.accepted ? "accepted" : "refused";
      const name = `${node.source}, ${state}`;
      line.append(element("span", { class: `guess ${node.source} ${state}`, title: name }, visible(node.text)));
      numShown += 1;
      next = children.get(next[0]) ?? [];
    }
    for (const child of next) visit(child, depth + 1);
  };
  for (const root of children.get(-1) ?? []) visit(root, 0);
  if (draft.length > numShown) list.append(element("li", { class: "branch" }, `${draft.length - numShown} more`));
  return list;
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
