// The page: which run and step it is at, its panels, and the keys.

import { chart, LINES, showStep } from "./charts.js";
import { duration, el, fill, message, number, visible } from "./dom.js";
import { drawBatch, drawBroken, drawComparison, drawHealth, drawLanes, drawProvenance, drawTime, drawTroubles, metricChart } from "./panels.js";
import { rolloutPanel } from "./rollouts.js";
import { ask, follow, isReport, reportFacts } from "./source.js";

const REWARD = "reward/mean";
const VALIDATION = "validation/score";
const FEW = ["actor/without_signal", "actor/entropy", "actor/approx_kl", "actor/grad_norm", "rollout/response_length", "rollout/truncated", "rollout/logprob_gap_mean", "reward/std"];

const BUSY = ["actor/mfu", "critic/mfu", "rollout/idle", "actor/idle"];

const state = { runs: [], run: null, step: null, steps: [], summary: {}, data: {}, spread: {}, health: null, time: null, open: null, added: [], follows: true, pinned: null, news: {} };
const panels = {};

function panel(id, title, line) {
  const body = el("div", { class: "panel-body" });
  const node = el("section", { id, class: "panel" }, el("header", {}, el("h2", {}, title), el("p", {}, line)), body);
  panels[id] = body;
  return node;
}

/** Draw a panel; what goes wrong costs this panel alone. */
async function guarded(id, draw) {
  try {
    await draw(panels[id]);
  } catch (error) {
    fill(panels[id], message(error.message, "error"));
  }
}

// The step that the page is at

function setStep(step, { follows = false } = {}) {
  if (!state.steps.length) return;
  const best = state.steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  state.step = best;
  state.follows = follows || best === state.steps.at(-1);
  slider.value = String(state.steps.indexOf(best));
  fill(stepLabel, el("b", {}, number(best)), ` / ${number(state.summary[state.run].num_steps || state.steps.at(-1))}`);
  history.replaceState(null, "", `#step=${best}`);
  showStep(best);
  headlineNumbers();
  if (state.health) health();
  clearTimeout(state.waiting);
  state.waiting = setTimeout(ofStep, 30);
}

function ofStep() {
  state.waiting = null;
  guarded("rollouts-body", () => rollouts.show(state.run, state.step));
  if (state.lanes) ask("timeline", { run: state.run, step: state.step }).then((found) => drawLanes(state.lanes, found), (error) => fill(state.lanes, message(error.message, "error")));
}

const move = (by) => setStep(state.steps[Math.max(0, Math.min(state.steps.length - 1, state.steps.indexOf(state.step) + by))]);

// Panels

function headlineNumbers() {
  const one = state.summary[state.run];
  const data = state.data[state.run];
  const at = data.steps.indexOf(state.step);
  const value = (name) => data.columns[name]?.[at];
  const latest = (name) => data.columns[name]?.slice(0, at + 1).findLast((found) => found !== null && found !== undefined);
  const tile = (label, text, note) => el("div", { class: "tile" }, el("span", { class: "quiet" }, label), el("b", {}, text), el("i", {}, note ?? ""));
  fill(
    tiles,
    tile("reward", number(value(REWARD), 3), "mean of the step"),
    data.columns[VALIDATION]?.some((found) => found !== null) && tile("validation", number(latest(VALIDATION), 3), "newest so far"),
    one.best && tile("best", number(one.best.score, 3), `step ${one.best.step}`),
    tile("tokens a response", number(value("rollout/response_length"), 3), "mean"),
    tile("at work", duration(one.seconds), `${number(one.step)} steps`),
  );
}

async function headline() {
  const lines = [];
  const bands = [];
  for (const [at, run] of state.runs.entries()) {
    const { steps, columns } = state.data[run];
    const spread = state.spread[run];
    if (spread && run === state.run && spread.steps.length) {
      bands.push([lines.length, lines.length + 1]);
      lines.push({ label: "p90", steps: spread.steps, values: spread.high, colour: "quiet", hidden: true }, { label: "p10", steps: spread.steps, values: spread.low, colour: "quiet", hidden: true });
    }
    const many = state.runs.length > 1;
    lines.push({ label: many ? run : "reward", steps, values: columns[REWARD] ?? steps.map(() => null), colour: LINES[at % LINES.length], width: 2 });
    const points = steps.filter((_, place) => Number.isFinite(columns[VALIDATION]?.[place]));
    const values = (columns[VALIDATION] ?? []).filter((value) => Number.isFinite(value));
    if (points.length) lines.push({ label: many ? `${run} validation` : "validation", steps: points, values, colour: many ? LINES[at % LINES.length] : "vermilion", points: true });
  }
  fill(curve, chart({ title: "reward", lines, bands, height: 260, onStep: setStep, wide: true }));
  const names = [...new Set([...state.added, ...FEW])].filter((name) => state.runs.some((run) => state.summary[run].metrics.includes(name)));
  fill(few, names.map((name) => metricChart(name, state.runs.map((run) => ({ run, data: state.data[run] })), setStep, state.added.includes(name) && (() => ((state.added = state.added.filter((one) => one !== name)), headline())))));
  showStep(state.step);
}

async function addMetric(name) {
  if (!name || state.added.includes(name)) return;
  state.added.unshift(name);
  await loadSeries();
  await headline();
}

const health = () => guarded("health-body", () => drawHealth(signals, state.health, state.step, state.open, state.data[state.run], { onStep: setStep, onOpen: (name) => ((state.open = name), health()) }));

async function time(body) {
  state.time = await ask("time", { run: state.run });
  const names = BUSY.filter((name) => state.summary[state.run].metrics.includes(name));
  const data = names.length ? await ask("series", { run: state.run, names: names.join(",") }) : null;
  state.lanes = drawTime(body, state.time, state.step, setStep);
  state.lanes.before(el("div", { class: "charts" }, names.map((name) => metricChart(name, [{ run: state.run, data }], setStep))));
  drawLanes(state.lanes, await ask("timeline", { run: state.run, step: state.step }));
}

async function pin(name) {
  state.pinned = name;
  const found = await ask("prompt", { run: state.run, name });
  const rows = found.steps.map((one) => el("button", { class: "pin-step", on: { click: () => setStep(one.step) } }, el("b", {}, `step ${one.step}`), el("span", {}, one.scores.map((score) => number(score, 2)).join("  ")), el("i", {}, visible(one.response).slice(0, 160))));
  fill(pinned, el("div", { class: "detail-head" }, el("h3", {}, `pinned: ${visible(name)}`), el("span", { class: "quiet" }, `in ${found.steps.length} steps`), el("button", { class: "plain", on: { click: () => fill(pinned) } }, "unpin")), el("div", { class: "pins" }, rows));
}

// Loading

async function loadSeries() {
  await Promise.all(
    state.runs.map(async (run) => {
      const signals = (state.health?.rules ?? []).map((rule) => rule.name);
      const names = [...new Set([REWARD, VALIDATION, ...FEW, ...signals, ...state.added])];
      state.data[run] = await ask("series", { run, names: names.join(",") });
    }),
  );
}

async function loadAll() {
  const found = await Promise.all(state.runs.map((run) => ask("summary", { run })));
  for (const one of found) state.summary[one.name] = one;
  state.steps = state.summary[state.run].steps;
  await loadSeries();
  slider.max = String(Math.max(0, state.steps.length - 1));
  head();
  if (!state.steps.length) {
    fill(curve, message(state.summary[state.run].why || "no step is done yet: this page draws itself when the first one is"));
    for (const id of ["time-body", "broke-body", "batch-body", "provenance-body"]) lazily(id);
    return;
  }
  await headline();
}

const LOADS = {
  "time-body": time,
  "broke-body": async (body) => drawBroken(body, await ask("broke", { run: state.run })),
  "batch-body": async (body) => drawBatch(body, await ask("batch", { run: state.run })),
  "provenance-body": async (body) => drawProvenance(body, await ask("provenance", { run: state.run })),
  "compare-body": async (body) => drawComparison(body, [state.run, state.runs.find((run) => run !== state.run)], state.step, setStep),
};
const lazily = (id) => guarded(id, LOADS[id]);

async function rest() {
  await guarded("health-body", async () => {
    state.health = await ask("health", { run: state.run });
    await loadSeries();
    await health();
  });
  ask("troubles", { run: state.run }).then((found) => drawTroubles(troubles, found, setStep), (error) => fill(troubles, message(error.message, "error")));
  ask("spread", { run: state.run }).then(async (found) => ((state.spread[state.run] = found), state.steps.length && headline()), () => {});
  for (const id of Object.keys(LOADS)) if (panels[id]) await lazily(id);
}

function head() {
  const one = state.summary[state.run];
  document.title = `${one.name} · rallypoint`;
  fill(title, visible(one.name));
  fill(chip, el("span", { class: `pill ${one.state.replace(" ", "-")}`, title: one.why }, one.state));
  fill(recipe, [one.recipe, one.why && one.state !== "finished" ? ` · ${visible(one.why).slice(0, 160)}` : ""].join(""));
  fill(options, one.metrics.map((name) => el("option", { value: name })));
  fill(about, isReport ? `report, without a server: ${reportFacts()?.said?.[state.run] ?? ""}` : "");
}

async function changed(event) {
  const before = state.news[event.run];
  state.news[event.run] = event;
  if (!state.runs.includes(event.run) || state.busy) return;
  const one = state.summary[event.run];
  if (!before && one?.step === event.step) return;
  const isNew = !before || ["step", "rollouts", "running"].some((name) => before[name] !== event[name]);
  state.busy = true;
  const followed = state.follows;
  try {
    if (isNew) await loadAll();
    if (event.run === state.run && state.steps.length) {
      if (isNew) state.health = await ask("health", { run: state.run });
      if (isNew && followed) setStep(state.steps.at(-1), { follows: true });
      if (isNew) health();
      if (!state.lanes) await rest();
      else await lazily("broke-body");
    }
  } catch {
    // The server has ended; the mark in the head says so.
  } finally {
    state.busy = false;
  }
}

// The frame

const title = el("h1", {});
const chip = el("span", {});
const recipe = el("span", { class: "quiet recipe" });
const about = el("span", { class: "quiet" });
const alive = el("span", { class: "alive", title: "live" });
const slider = el("input", { type: "range", min: "0", max: "0", id: "slider", "aria-label": "step" });
const stepLabel = el("span", { id: "step", class: "step" });
const tiles = el("div", { class: "tiles" });
const curve = el("div", {});
const few = el("div", { class: "charts" });
const options = el("datalist", { id: "metrics" });
const troubles = el("div", { id: "troubles" });
const signals = el("div", { class: "panel-body" });
const pinned = el("div", { id: "pinned" });
let rollouts;

slider.addEventListener("input", () => setStep(state.steps[Number(slider.value)]));

function theme(next) {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = next ?? (now === "dark" ? "light" : "dark");
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch {
    // A file that was opened from a mail may keep nothing.
  }
  showStep(state.step);
}

const KEYS = [["j / k", "next, previous step (J / K: ten)"], ["← / →", "previous, next rollout"], ["/", "search rollouts"], ["m", "add a metric"], ["p", "pin the prompt, to follow it over the steps"], ["Home / End", "first, newest step"], ["t", "light or dark"], ["?", "this list"]];

function help() {
  const dialog = document.getElementById("help");
  fill(dialog, el("h2", {}, "Keys"), el("dl", { class: "facts" }, KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])), el("form", { method: "dialog" }, el("button", { class: "plain" }, "close")));
  dialog.showModal();
}

const search = el("input", { type: "search", list: "metrics", id: "metric", placeholder: "add a metric  m", "aria-label": "add a metric" });
search.addEventListener("change", () => {
  addMetric(search.value);
  search.value = "";
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const run = { j: () => move(1), k: () => move(-1), J: () => move(10), K: () => move(-10), ArrowRight: () => rollouts.next(1), ArrowLeft: () => rollouts.next(-1), "/": () => rollouts.focus(), "?": help, t: () => theme(), m: () => search.focus(), p: () => rollouts.pin(), Home: () => setStep(state.steps[0]), End: () => setStep(state.steps.at(-1)) }[event.key];
  if (run) {
    event.preventDefault();
    run();
  }
});

function frame() {
  const nav = [["headline", "reward"], ["health", "health"], ["rollouts", "rollouts"], ["time", "time"], ["broke", "what broke"], ["batch", "batch"], ["provenance", "provenance"], state.runs.length > 1 && ["compare", "comparison"]].filter(Boolean);
  const button = (text, run, label) => el("button", { class: "plain", title: label, "aria-label": label, on: { click: run } }, text);
  fill(
    document.getElementById("top"),
    el("div", { class: "top-line" }, title, chip, recipe, el("span", { class: "grow" }), about, !isReport && alive, button("◐", () => theme(), "light or dark (t)"), button("?", help, "keys (?)")),
    el("div", { class: "top-line" }, el("nav", {}, nav.map(([id, text]) => el("a", { href: `#${id}` }, text))), el("span", { class: "scrub" }, button("‹", () => move(-1), "previous step (k)"), slider, button("›", () => move(1), "next step (j)"), stepLabel)),
  );
  for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", (event) => (event.preventDefault(), document.getElementById(link.hash.slice(1)).scrollIntoView({ behavior: "smooth" })));
  const named = (id, text, line) => {
    const node = panel(id, text, line);
    panels[`${id}-body`] = panels[id];
    return node;
  };
  fill(
    document.getElementById("main"),
    named("headline", "Reward", "Mean score of each step's rollouts, shaded from p10 to p90; points are validations. A click moves all panels to that step."),
    named("health", "Health", "What lasted, as rally doctor says it, and below what the numbers of this step say, worst first: each opens its meaning, its evidence, and the key to turn."),
    named("rollouts", "Rollouts", "What was sampled in this step, how it scored, and what was trained of it."),
    named("time", "Where time goes", "Seconds of each step by phase, ranks that others waited for, memory beside its plan, and what bought nothing."),
    named("broke", "What broke", "Starts and how they ended, lost processes, failed rollouts with the first reason, and checkpoints set aside."),
    named("batch", "The arithmetic of the batch", "How prompts become rows, mini-batches and micro-batches over ranks, with the numbers of this run."),
    named("provenance", "Provenance", "Config against defaults, versions, seed, and digests of what decided the weights."),
    state.runs.length > 1 && named("compare", "Comparison", "What the first two runs differ in, the first event that is not the same, and the same prompts' answers."),
  );
  fill(panels["health-body"], troubles, signals);
  fill(panels["headline-body"], tiles, curve, el("div", { class: "tools" }, search, options), few);
  const inside = el("div", {});
  fill(panels["rollouts-body"], pinned, inside);
  rollouts = rolloutPanel(inside, { onPin: pin });
}

async function start() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept) theme(kept);
  } catch {
    // See `theme`.
  }
  state.runs = (await ask("runs")).runs;
  state.run = state.runs[0];
  frame();
  await loadAll();
  const asked = Number(/step=(\d+)/.exec(location.hash)?.[1]);
  if (state.steps.length) {
    setStep(asked || state.steps.at(-1));
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
    await rest();
  }
  document.documentElement.dataset.ready = "true";
  follow(changed, (is) => (alive.className = is ? "alive on" : "alive off"));
}

start().catch((error) => fill(document.getElementById("main"), message(error.message, "error")));
