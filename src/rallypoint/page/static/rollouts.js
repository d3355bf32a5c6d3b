// Rollouts of a step: the table, a prompt's group, and one rollout token by token.

import { chart } from "./charts.js";
import { ask, hasTokens } from "./source.js";
import { counted, el, fill, message, number, percent, visible } from "./dom.js";

const PAGE = 25;
const MOST_TOKENS = 4000;
const LONG = 64; // tokens that are seen at a glance
const SORTS = { batch: "in order of the batch", "-score": "highest score", score: "lowest score", "-advantage": "highest advantage", advantage: "lowest advantage", "-length": "longest", length: "shortest", "-gap": "largest sampler–trainer gap" };
const TINTS = { advantages: "advantage", ratio: "ratio trainer / sampler", entropy: "entropy", surprise: "surprise (−logprob)", difference: "sampler–trainer difference" };

/** Return the panel: `show(run, step)` moves it, `next(by)` goes to another rollout, `mark()` tells what is pinned. */
export function rolloutPanel(body, { onPin, isPinned }) {
  const asked = { only: "all", sort: "batch", search: "", offset: 0, kind: "step" };
  const at = { run: null, step: null, rows: [], place: null, found: 0, size: 1, tint: "advantages", side: false, token: 0, answer: null };
  const list = el("div", { class: "rollout-list" });
  const detail = el("div", { class: "rollout-detail" });
  const count = el("span", { class: "quiet", id: "rollout-count" });
  const search = el("input", { type: "search", id: "search", placeholder: "search  /", title: "in prompts and answers", "aria-label": "search rollouts" });
  const choose = (name, options, label) =>
    el("select", { id: `choose-${name}`, "aria-label": label, on: { change: (event) => set(name, event.target.value) } }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  const only = choose("only", { all: "all" }, "which rollouts");
  const tools = el(
    "div",
    { class: "tools" },
    search,
    only,
    choose("sort", SORTS, "order"),
    choose("kind", { step: "trained on", validation: "validation" }, "kind"),
    count,
  );
  fill(body, tools, el("div", { class: "rollout-split" }, list, detail));
  let waiting;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => set("search", search.value), 150);
  });

  function set(name, value) {
    asked[name] = value;
    asked.offset = 0;
    return load(true);
  }

  /** Rows of a page of the list: whole groups. */
  const most = () => at.size * Math.max(1, Math.floor(PAGE / at.size));

  const where = () => ({ run: at.run, step: at.step, kind: asked.kind === "step" ? undefined : asked.kind });

  /** Draw the list; `first`: from its first row on, or from its last if `isBack`, though nothing has changed. */
  async function load(first = false, isBack = false) {
    const token = (at.token += 1);
    try {
      let found = await ask("rollouts", { ...asked, ...where(), limit: most() });
      if (found.group_size !== at.size) {
        at.size = found.group_size;
        found = await ask("rollouts", { ...asked, ...where(), limit: most() });
      }
      const answer = JSON.stringify(found);
      if (token !== at.token || (!first && answer === at.answer)) return;
      Object.assign(at, { answer, rows: found.rows, found: found.found });
      const nums = { all: found.total, ...found.filters };
      fill(only, Object.entries(nums).map(([name, num]) => el("option", { value: name, selected: name === asked.only }, `${name} (${num})`)));
      const [, low, middle, high] = found.scores;
      const of = found.kept === undefined ? `${found.total} rollouts` : `the ${found.kept} in this report, of ${found.total} rollouts`;
      fill(count, !found.found ? `0 of ${of}` : `${found.found} of ${of} · ${found.found < (found.kept ?? found.total) ? "their " : ""}score p10 ${number(low, 3)}, median ${number(middle, 3)}, p90 ${number(high, 3)}`);
      drawList();
      const kept = at.rows.find((row) => row.place === at.place);
      if (first) list.scrollTop = 0;
      const opened = isBack ? at.rows.at(-1) : at.rows.find((row) => hasTokens(at.run, at.step, row.place)) ?? at.rows[0];
      if (at.rows.length) await pick((!first && kept) || opened);
      else fill(detail, message("no rollout is left: try another filter"));
    } catch (error) {
      if (token !== at.token) return;
      Object.assign(at, { answer: null, rows: [] });
      fill(count);
      fill(list, message(error.message, "error"));
      fill(detail);
    }
  }

  function drawList() {
    const rows = at.rows.map((row) =>
      el(
        "button",
        { class: "rollout-row", "aria-current": row.place === at.place ? "true" : undefined, data: { place: row.place }, on: { click: () => pick(row) } },
        el("span", { class: "rollout-name" }, visible(row.name), el("i", {}, ` · ${row.sample_index}`)),
        el("span", { class: "rollout-score" }, row.failure === null ? number(row.score, 3) : "failed"),
        el("span", { class: "rollout-text" }, visible(row.response).slice(0, 120) || "(empty)"),
        el("span", { class: `rollout-advantage ${sign(row.advantage)}`, title: row.untrained }, learned(row)),
        el("span", { class: "rollout-length quiet" }, `${row.length} tok${row.finish_reason === "length" ? ", cut" : ""}`),
      ),
    );
    const last = Math.min(asked.offset + most(), at.found);
    const move = (by, text) => el("button", { class: "plain", disabled: asked.offset + by < 0 || asked.offset + by >= at.found, on: { click: () => ((asked.offset += by), load(true)) } }, text);
    fill(list, rows, at.found > most() && el("div", { class: "pager" }, move(-most(), "‹ before"), `${asked.offset + 1}–${last} of ${at.found}`, move(most(), "after ›")));
  }

  async function pick(row) {
    at.place = row.place;
    for (const button of list.querySelectorAll("[data-place]")) button.toggleAttribute("aria-current", Number(button.dataset.place) === at.place);
    const token = (at.token += 1);
    const [whole, one] = await Promise.allSettled([ask("group", { ...where(), prompt: row.prompt_index }), ask("rollout", { ...where(), place: row.place })]);
    if (token === at.token) drawDetail(row, whole.value, one.value, one.reason);
  }

  function drawDetail(row, whole, one, why) {
    const samples = (whole?.rows ?? [row]).map((other) =>
      el(
        "button",
        { class: `sample ${sign(other.advantage)}`, "aria-current": other.place === row.place ? "true" : undefined, title: `sample ${other.sample_index}: score ${number(other.score)}, advantage ${number(other.advantage)}`, on: { click: () => pick(other) } },
        el("b", {}, other.failure === null ? number(other.score, 3) : "✕"),
        el("i", {}, other.replaced ? "replaced" : other.advantage === null ? "–" : number(other.advantage, 2)),
      ),
    );
    const side = el("button", { class: "plain", id: "side", on: { click: () => ((at.side = !at.side), drawDetail(row, whole, one, why)) } }, at.side ? "one at a time" : "side by side");
    detail.dataset.step = at.step; // what it shows; the head is ahead of it by an answer
    const pin = el("button", { class: "plain", id: "pin", title: "follow this prompt over the steps (p)", on: { click: () => onPin(row.name) } }, isPinned(row.name) ? "unpin" : "pin");
    at.name = row.name;
    fill(
      detail,
      el("div", { class: "detail-head" }, el("h3", {}, visible(row.name)), el("span", { class: "quiet" }, `prompt ${row.prompt_index}, sample ${row.sample_index}`), pin, side),
      text("prompt", whole?.prompt ?? row.prompt),
      el("div", { class: "samples", "aria-label": "the group: score, advantage" }, samples),
      at.side && whole ? sideBySide(whole.rows, row, pick) : one ? drawOne(one, at, () => drawDetail(row, whole, one, why)) : [message(why?.message ?? "", "error"), text("response", row.response)],
    );
  }

  return {
    show(run, step) {
      if (step === null) return fill(list, message("no step is done yet"));
      if (at.run !== run || at.step !== step) asked.offset = 0;
      Object.assign(at, { run, step });
      return load();
    },
    next(by) {
      const place = at.rows.findIndex((row) => row.place === at.place) + by;
      const offset = asked.offset + Math.sign(by) * most();
      const seen = () => list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
      if (at.rows[place]) pick(at.rows[place]).then(seen);
      else if (at.rows.length && offset >= 0 && offset < at.found) {
        asked.offset = offset;
        load(true, by < 0).then(seen);
      }
    },
    mark() {
      const button = detail.querySelector("#pin");
      if (button) button.textContent = isPinned(at.name) ? "unpin" : "pin";
    },
    search(words) {
      search.value = words;
      return set("search", words);
    },
    focus: () => search.focus(),
    pin: () => at.rows.length && onPin((at.rows.find((row) => row.place === at.place) ?? at.rows[0]).name),
  };
}

const sign = (value) => (value > 0 ? "plus" : value < 0 ? "minus" : "zero");

function text(label, content) {
  return el("div", { class: "said" }, el("span", { class: "role" }, label), el("pre", {}, visible(content)));
}

/** Say in two words what was learned from a rollout. */
function learned(row) {
  if (row.replaced) return "replaced";
  return row.advantage === null ? (row.is_trained ? "trained" : "not trained") : `A ${number(row.advantage, 3)}`;
}

function sideBySide(rows, current, pick) {
  const parts = (row) => Object.entries(row.reward_parts ?? {}).map(([name, value]) => `${visible(name)} ${number(value, 3)}`);
  const facts = (row) => [...parts(row), counted(row.length, "token"), row.finish_reason, `version ${row.version}`, row.untrained].filter(Boolean);
  const article = (row) =>
    el(
      "article",
      { class: row.place === current.place ? "chosen" : "", on: { click: () => pick(row) } },
      el("header", {}, `${row.sample_index} · `, el("b", {}, row.failure === null ? number(row.score, 3) : "failed"), el("span", { class: `pill ${sign(row.advantage)}` }, learned(row))),
      el("p", { class: "quiet small" }, visible(facts(row).join(" · "))),
      el("pre", {}, visible(row.response) || "(empty)"),
    );
  return el("div", { class: "side" }, rows.map(article));
}

function drawOne(one, at, again) {
  const choice = el("select", { id: "tint", "aria-label": "tint of tokens", on: { change: (event) => ((at.tint = event.target.value), again()) } }, Object.entries(TINTS).map(([value, name]) => el("option", { value, selected: value === at.tint }, one[value] ? name : `${name}: not recorded here`)));
  const parts = Object.entries(one.reward_parts ?? {}).map(([name, value]) => [name, number(value)]);
  const versions = [...new Set(one.versions)];
  const facts = [
    ["score", one.score === null ? "none" : number(one.score)],
    ...parts,
    ["finish", one.finish_reason],
    ["tokens", number(one.num_tokens)],
    ["weights", versions.length > 1 ? `versions ${Math.min(...versions)}–${Math.max(...versions)}` : `version ${versions[0] ?? one.version}`],
    ["tool calls", one.num_tool_calls ? `${one.num_tool_calls}, ${one.num_tool_errors} failed` : null],
    ["failure", one.failure],
    ...Object.entries(one.extras ?? {}).map(([name, value]) => [name, number(value)]),
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const judged = [["right answer", one.ground_truth], ["its answer", one.answer]].filter(([, value]) => value);
  return [
    judged.length > 0 && el("p", { class: "judged" }, judged.map(([name, value]) => el("span", {}, el("span", { class: "role" }, `${name} `), el("b", {}, visible(value))))),
    el("div", { class: "tools" }, el("label", { class: "quiet" }, "tint by ", choice), one[at.tint] && scale(at.tint, one[at.tint])),
    !one[at.tint] && message(`${TINTS[at.tint]}: not recorded here (${visible(one.unrecorded)})`),
    tokens(one, at.tint),
    one[at.tint] && one.pieces.length > LONG && byPlace(one, at.tint),
    legend(one),
    one.note && message(one.note),
    one.turns.length > 0 && el("details", { class: "turns", open: true }, el("summary", {}, `conversation of ${one.turns.length} turns`), one.turns.flatMap(turn)),
    el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, visible(value))])),
  ];
}

function turn(each, number_) {
  return [
    ...each.said.map((one) => el("div", { class: `said ${["user", "tool", "system"].includes(one.role) ? one.role : "user"}` }, el("span", { class: "role" }, visible(one.role)), el("pre", {}, visible(one.text)))),
    el("div", { class: "said assistant" }, el("span", { class: "role" }, `turn ${number_ + 1}${each.limit ? `, ${each.limit}` : ""}`), el("pre", {}, visible(each.response) || "(empty)")),
  ];
}

const largestOf = (values) => Math.max(0, ...(values ?? []).slice(0, MOST_TOKENS).filter(Number.isFinite).map(Math.abs));

function scale(tint, values) {
  const ends = tint === "advantages" ? ["worse", "better"] : tint === "ratio" ? ["trainer less likely", "more likely"] : ["0", `${number(largestOf(values), 3)} nats`];
  return el("span", { class: "scale quiet" }, ends[0], el("i", { class: ["advantages", "ratio"].includes(tint) ? "diverging" : "rising" }), ends[1]);
}

/** Draw the numbers of a long response over its tokens; a click goes to the token. */
function byPlace(one, tint) {
  const line = { label: TINTS[tint], steps: one[tint].map((_, place) => place), values: one[tint].map((value, place) => (one.why[place] ? null : value)), colour: "blue", width: 1 };
  const go = (place) => document.querySelectorAll("#tokens .token")[place]?.scrollIntoView({ block: "center", behavior: "smooth" });
  return chart({ title: `${TINTS[tint]} by token`, lines: [line], height: 110, onStep: go, wide: true, noun: "token" });
}

function tokens(one, tint) {
  const values = one[tint];
  const shown = (value) => (!Number.isFinite(value) ? 0 : tint === "ratio" ? Math.log(Math.max(value, 1e-9)) : value);
  const largest = largestOf(values?.map(shown)) || 1;
  const node = el("div", { class: "tokens", id: "tokens", "aria-label": "response, token by token" });
  const draw = (most) =>
    fill(
      node,
      one.pieces.slice(0, most).map((piece, at) => {
        const value = shown(values?.[at]);
        const strength = Math.min(1, Math.abs(value) / largest);
        const kind = one.why[at] ? "untrained" : value < 0 ? "minus" : ["advantages", "ratio"].includes(tint) ? "plus" : "rising";
        const says = [
          `token ${at} (id ${one.ids[at]})`,
          one.why[at] ? `not trained: ${one.reasons[one.why[at]]}` : "trained",
          ...Object.entries(TINTS).flatMap(([name, words]) => (one[name] ? [`${words} ${number(one[name][at])}`] : [])),
          `version ${one.versions[at]}`,
        ];
        const span = el("span", { class: `token ${kind}`, title: says.join("\n") }, visible(piece));
        if (!one.why[at]) span.style.setProperty("--strength", `${Math.round(78 * strength)}%`);
        return span;
      }),
      one.pieces.length > most && el("button", { class: "plain", on: { click: () => draw(Infinity) } }, `… all ${one.pieces.length} tokens`),
    );
  draw(MOST_TOKENS);
  if (!one.pieces.length) fill(node, el("i", { class: "quiet" }, "(no tokens)"));
  return node;
}

function legend(one) {
  const counts = new Map();
  for (const why of one.why) counts.set(why, (counts.get(why) ?? 0) + 1);
  const size = one.why.length || 1;
  return el("ul", { class: "reasons" }, [...counts].sort(([a], [b]) => a - b).map(([why, count]) => el("li", { class: why ? "untrained" : "" }, el("b", {}, `${counted(count, "token")} (${percent(count / size)})`), ` ${why ? "not trained: " : ""}${visible(one.reasons[why])}`)));
}
