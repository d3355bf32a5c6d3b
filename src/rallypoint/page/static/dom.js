// Elements, numbers and text. Whatever comes from a run reaches the page through `textContent` alone.

/** Return an element; children are elements or text. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace what is in an element. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Write a number in few digits; a dash for none. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${number(100 * share, 3)} %`);

/** Write a number with its noun. */
export const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Write seconds in their largest unit. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${number(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// Characters that steer a terminal, or that turn the order of a line around, are shown and not obeyed; joiners, of which
// scripts and emoji are made, are left as they are.
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text ?? "").replace(STEERING, (one) => {
    const code = one.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨${code.toString(16).padStart(4, "0")}⟩`;
  });
}

/** Return a table; rows are lists of cells, and a cell is text or an element. */
export function table(heads, rows, properties = {}) {
  const cell = (tag) => (content, at) => el(tag, { class: heads[at]?.class }, content);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      properties,
      el("thead", {}, el("tr", {}, heads.map((head, at) => cell("th")(head.text ?? head, at)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td"))))),
    ),
  );
}

export const numeric = (text) => ({ text, class: "numeric" });

const MARKS = { ok: "●", watch: "▲", bad: "■" };

/** Return the mark of a level: its shape says the same as its colour. */
export const mark = (level) => el("span", { class: `mark ${level}`, title: level }, MARKS[level] ?? "○");

export function message(text, kind = "quiet") {
  return el("p", { class: `message ${kind}`, role: kind === "error" ? "alert" : undefined }, visible(text));
}
