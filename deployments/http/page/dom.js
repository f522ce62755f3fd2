// Making elements; text is always text, never markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, options, children);
  return made;
}

export function svg(tag, options = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(made, options, children);
  return made;
}

function fill(made, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
}

// A function that has `draw` called in the next frame, once, however often it is called until then.
export function eachFrame(draw) {
  let frame = null;
  return () => {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      draw();
    });
  };
}

// One control in the place of another; the focus goes along.
export function swap(hidden, shown) {
  const hadFocus = document.activeElement === hidden;
  shown.hidden = false;
  if (hadFocus) shown.focus({ preventScroll: true });
  hidden.hidden = true;
}

export const number = (value, digits = 0) =>
  Number.isFinite(value)
    ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    : "–";

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit ? 1 : 0)} ${units[unit]}`;
}
