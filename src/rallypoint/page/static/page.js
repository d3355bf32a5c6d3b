// The page: which run and step it is at, its panels, and the keys.

import { chart, LINES, showStep, smoothed } from "./charts.js";
import { counted, duration, el, fill, mark, message, number, visible } from "./dom.js";
import {
  drawAnswers, drawBatch, drawBroken, drawComparison, drawHealth, drawLanes, drawProvenance, drawTime, drawTroubles, metricChart,
} from "./panels.js";
import { rolloutPanel } from "./rollouts.js";
import { ask, follow, isReport, reportFacts } from "./source.js";

const FEW = [
  "actor/without_signal", "actor/entropy", "actor/approx_kl", "actor/grad_norm",
  "rollout/response_length", "rollout/truncated", "rollout/logprob_gap_mean", "actor/lr",
];
const BUSY = ["actor/mfu", "critic/mfu", "rollout/idle", "actor/idle"];

const state = {
  runs: [],
  run: null, // the run that is looked at, and the one that it is compared with
  other: null,
  step: null, // null until the first step is done
  steps: [],
  isAtEnd: true, // whether the page goes on to each new step
  summary: {}, // by run, as are the next two
  curves: {},
  spread: {},
  values: { metrics: {}, validation: {} }, // of the step
  health: { rules: [] },
  open: null, // the finding whose evidence is shown
  added: [], // metrics that were searched
  smooth: 0, // how much each value of a curve counts of the one after it
  pinned: null,
  troubles: [], // what has lasted
};

// Panels: each is drawn anew when what it shows has changed and it can be seen. What goes wrong costs one panel.

const PANELS = {
  headline: ["Reward", "Mean score of each step's rollouts, shaded from p10 to p90; points are validations. A click moves all panels to that step."],
  health: ["Health", "What lasted, as rally doctor says it, and below what the numbers of this step say, worst first: each opens its meaning, its evidence, and the key to turn."],
  rollouts: ["Rollouts", "What was sampled in this step, how it scored, and what was trained of it."],
  time: ["Where time goes", "Seconds of each step by phase, ranks that others waited for, memory beside its plan, and what bought nothing."],
  broke: ["Crashes and restarts", "Starts and how they ended, lost processes, what failed with the first traceback, and checkpoints set aside."],
  batch: ["The arithmetic of the batch", "How prompts become rows, mini-batches and micro-batches over ranks, with the numbers of this run."],
  provenance: ["Provenance", "Config against defaults, versions, seed, and digests of what decided the weights."],
  compare: ["Comparison", "What two runs differ in, the first event that is not the same, and the same prompts' answers."],
};
const bodies = {};
const inView = new Set();
const stale = new Set();

const watch = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target.id) : inView.delete(target.id);
  drawStale();
});

function panel(id) {
  const [title, line] = PANELS[id];
  bodies[id] = el("div", { class: "panel-body" });
  return el("section", { id, class: "panel" }, el("header", {}, el("h2", {}, title), el("p", {}, line)), bodies[id]);
}

async function drawn(id) {
  stale.delete(id);
  try {
    await DRAW[id](bodies[id]);
  } catch (error) {
    fill(bodies[id], message(error.message, "error"));
  }
}

const drawStale = () => Promise.all([...stale].filter((id) => inView.has(id)).map(drawn));

const DRAW = {
  headline,
  health: async (body) => {
    const [facts, found] = await Promise.all([ask("health", { run: state.run }), ask("troubles", { run: state.run })]);
    state.health = facts;
    await loadCurves();
    drawTroubles(troubles, found, { onStep: setStep, onOpen: openTrouble, onPrompt: followPrompt });
    health();
    fill(body, troubles, signals);
  },
  rollouts: async (body) => {
    if (state.steps.length && !state.summary[state.run].rollouts.step.length) {
      rollouts = null;
      fill(body, message("this run has none: its recipe samples none, or tracking.rollouts_gib is 0"));
      return;
    }
    if (!rollouts) {
      rollouts = rolloutPanel(inside, { onPin: togglePin, isPinned: (name) => name === state.pinned });
      fill(body, pinned, inside);
    }
    await rollouts.show(state.run, state.step);
  },
  time: async (body) => {
    const facts = await ask("time", { run: state.run });
    const names = BUSY.filter((name) => state.summary[state.run].metrics.includes(name));
    const { curves } = names.length ? await ask("series", { run: state.run, names: names.join(",") }) : {};
    fill(busy, names.map((name) => metricChart(name, [{ run: state.run, curves }], setStep, 0)));
    drawTime(body, facts, busy, lanes, setStep);
    await timeline();
  },
  broke: async (body) => drawBroken(body, await ask("broke", { run: state.run }), (step) => setStep(step)),
  batch: async (body) => drawBatch(body, await ask("batch", { run: state.run })),
  provenance: async (body) => drawProvenance(body, await ask("provenance", { run: state.run })),
  compare: async (body) => {
    const pair = bothRuns();
    const others = state.runs.filter((run) => run !== state.run);
    const choice = others.length > 1 && chooser("other", others, state.other, (run) => ((state.other = run), drawn("compare")));
    drawComparison(body, await ask("compare", { run: pair[0], with: pair[1] }), pair, choice, answers, setStep);
    await compareAnswers();
  },
};

// The step that the page is at

let turn = 0; // counts moves, so that no answer is drawn after the page has moved on
let waiting;

function setStep(step, { isAtEnd } = {}) {
  if (!state.steps.length || step === null) return;
  state.step = state.steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  state.isAtEnd = isAtEnd ?? state.step === state.steps.at(-1);
  slider.value = String(state.steps.indexOf(state.step));
  const last = state.summary[state.run].num_steps || state.steps.at(-1);
  fill(stepLabel, el("b", {}, number(state.step)), ` / ${number(last)}`);
  try {
    history.replaceState(null, "", `#step=${state.step}`);
  } catch {
    // In a frame of a notebook the page has no address.
  }
  showStep(state.step);
  markPin();
  turn += 1;
  clearTimeout(waiting);
  waiting = setTimeout(ofStep, 8);
}

/** Draw what depends on the step. */
async function ofStep() {
  const now = turn;
  const values = ask("values", { run: state.run, step: state.step }).catch(() => ({ metrics: {}, validation: {} }));
  const shown = rollouts && drawn("rollouts");
  const found = await values;
  if (now !== turn) return;
  state.values = found;
  tilesOfStep();
  health();
  await shown; // what is looked at most comes first
  if (now === turn) await Promise.all([timeline(), compareAnswers()]);
}

/** Draw what an answer has, unless the page has moved on meanwhile. */
async function answered(body, answer, draw) {
  const now = turn;
  try {
    const found = await answer;
    if (now === turn) draw(found);
  } catch (error) {
    if (now === turn) fill(body, message(error.message, "error"));
  }
}

async function timeline() {
  if (state.step !== null && lanes.isConnected) await answered(lanes, ask("timeline", { run: state.run, step: state.step }), (found) => drawLanes(lanes, found));
}

const bothRuns = () => state.runs.filter((run) => run === state.run || run === state.other);

async function compareAnswers() {
  if (state.step === null || !answers.isConnected) return;
  const pair = bothRuns();
  const tables = pair.map((run) => ask("rollouts", { run, step: state.step, limit: 512 }));
  await answered(answers, Promise.allSettled(tables), (found) => drawAnswers(answers, pair, state.step, found));
}

const move = (by) => setStep(state.steps[Math.max(0, Math.min(state.steps.length - 1, state.steps.indexOf(state.step) + by))] ?? null);

// Reward and health

function tilesOfStep() {
  const one = state.summary[state.run];
  const [metric, label] = one.headline;
  const { metrics, validation } = state.values;
  const tile = (name, text, note) => el("div", { class: "tile" }, el("span", { class: "quiet" }, name), el("b", {}, text), el("i", {}, note));
  fill(
    tiles,
    tile(label, number(metrics[metric], 3), "mean of the step"),
    one.validation in validation && tile("validation", number(validation[one.validation], 3), "newest so far"),
    one.best && tile("best of the run", number(one.best.score, 3), `step ${one.best.step}`),
    "rollout/response_length" in metrics && tile("tokens a response", number(metrics["rollout/response_length"], 3), "mean"),
    tile("at work", duration(one.seconds), counted(one.step, "step")),
  );
}

function headlineLines() {
  const lines = [];
  const bands = [];
  const many = state.runs.length > 1;
  for (const [at, run] of state.runs.entries()) {
    const { headline: [metric, label], validation } = state.summary[run];
    const spread = state.spread[run];
    if (metric === "reward/mean" && run === state.run && spread?.steps.length) {
      bands.push([lines.length, lines.length + 1]);
      const hidden = { steps: spread.steps, colour: "quiet", hidden: true };
      lines.push({ ...hidden, label: "p90", values: spread.high }, { ...hidden, label: "p10", values: spread.low });
    }
    const colour = LINES[at % LINES.length];
    const [steps, values] = state.curves[run][metric];
    lines.push({ label: many ? run : label, steps, values, colour, width: 2 });
    const [places, points] = state.curves[run][validation];
    if (places.length) lines.push({ label: many ? `${run} validation` : "validation", steps: places, values: points, colour: many ? colour : "vermilion", points: true });
  }
  return { lines, bands };
}

async function headline(body) {
  if (!state.steps.length) {
    fill(body, message(state.summary[state.run].why || "no step is done yet: this page draws itself when the first one is"));
    return;
  }
  const [metric, label] = state.summary[state.run].headline;
  const title = label[0].toUpperCase() + label.slice(1);
  if (metric !== "reward/mean") fill(body.previousElementSibling, el("h2", {}, title), el("p", {}, "What this recipe watches above all; points are validations. A click moves all panels to that step."));
  const { lines, bands } = headlineLines();
  fill(curve, chart({ title: label, lines: smoothed(lines, state.smooth), bands, height: 260, onStep: setStep, wide: true }));
  const names = [...new Set([...state.added, ...FEW])].filter((name) => state.runs.some((run) => state.summary[run].metrics.includes(name)));
  const removed = (name) => () => ((state.added = state.added.filter((one) => one !== name)), drawn("headline"));
  const perRun = state.runs.map((run) => ({ run, curves: state.curves[run] }));
  fill(few, names.map((name) => metricChart(name, perRun, setStep, state.smooth, state.added.includes(name) && removed(name))));
  if (!curve.isConnected) fill(body, verdicts, tiles, curve, el("div", { class: "tools" }, search, options, el("label", { class: "quiet smooth" }, "smooth ", smooth)), few);
  showStep(state.step);
}

function health() {
  const data = { step: state.step, metrics: state.values.metrics, curves: state.curves[state.run] };
  drawHealth(signals, state.health, state.troubles, state.open, data, { onStep: setStep, onOpen: (key) => ((state.open = key), health()) });
}

/** Open the tile of a trouble; what has none stands where time goes, or among the crashes. */
function openTrouble(one) {
  const rules = state.health.rules.filter((rule) => rule.name === one.name);
  const rule = rules.find((each) => each.words === one.words) ?? rules[0];
  if (rule) Object.assign(state, { open: rule.key });
  health();
  const place = rule ? signals.querySelector(".evidence") : document.getElementById(one.name.startsWith("time_s/") ? "time" : "broke");
  place?.scrollIntoView({ behavior: "smooth", block: rule ? "center" : "start" });
}

/** Tell on the first screen how many findings have lasted, worst first. */
async function loadVerdicts() {
  state.troubles = (await ask("troubles", { run: state.run }).catch(() => ({ troubles: [] }))).troubles;
  const worst = state.troubles.some((one) => one.level === "bad") ? "bad" : "watch";
  for (const node of [badge, document.querySelector("nav [href='#health']")]) {
    node.querySelector(".badge")?.remove();
    if (state.troubles.length) node.append(el("span", { class: `badge ${worst}`, title: counted(state.troubles.length, "finding") }, String(state.troubles.length)));
  }
  const some = (prompts) => prompts.slice(0, 3).join(", ") + (prompts.length > 3 ? ` and ${prompts.length - 3} more` : "");
  const place = ({ prompts, first, last }) => some(prompts) || (first === null ? "" : last === null || last === first ? `step ${first}` : `steps ${first} to ${last}`);
  const open = (one) => (one.prompts.length ? followPrompt(one.prompts[0]) : openTrouble(one));
  fill(verdicts, state.troubles.map((one) =>
    el("button", { class: `plain small verdict ${one.follows ? "follows" : ""}`, title: one.evidence, on: { click: () => open(one) } }, mark(one.level), visible(one.words), el("span", { class: "quiet" }, ` ${visible(place(one))}`))));
}

/** Add a metric, or all whose names begin with what ends with a slash. */
async function addMetric(name) {
  const found = name.endsWith("/") ? state.summary[state.run].metrics.filter((one) => one.startsWith(name)) : [name];
  const more = found.filter((one) => one && !state.added.includes(one));
  if (!more.length) return;
  state.added.unshift(...more);
  await loadCurves();
  await drawn("headline");
}

/** Change what is pinned, and keep what is looked at where it is. */
async function togglePin(name) {
  const before = inside.getBoundingClientRect().top;
  document.documentElement.style.overflowAnchor = "none"; // or the browser would move the page as well
  if (state.pinned === name) Object.assign(state, { pinned: null }) && fill(pinned);
  else await pin(name);
  rollouts?.mark();
  scrollBy({ top: inside.getBoundingClientRect().top - before, behavior: "instant" });
  requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.style.overflowAnchor = "")));
}

/** Mark the step in the strip of the pinned prompt. */
function markPin() {
  for (const node of pinned.querySelectorAll(".pin-step")) {
    const isHere = Number(node.dataset.step) === state.step;
    node.toggleAttribute("aria-current", isHere);
    if (isHere) node.parentElement.scrollLeft = node.offsetLeft - node.parentElement.offsetLeft - (node.parentElement.clientWidth - node.clientWidth) / 2;
  }
}

/** Pin a prompt, and go to the newest step in which it was sampled. */
async function followPrompt(name) {
  if (!rollouts) await drawn("rollouts");
  if (state.pinned !== name) await togglePin(name);
  const newest = Number([...pinned.querySelectorAll(".pin-step")].at(-1)?.dataset.step);
  await rollouts?.search(name);
  if (newest) setStep(newest);
  document.getElementById("rollouts").scrollIntoView({ behavior: "smooth" });
}

async function pin(name) {
  state.pinned = name;
  const found = await ask("prompt", { run: state.run, name });
  const rows = found.steps.map((one) =>
    el("button", { class: "pin-step", data: { step: one.step }, on: { click: () => setStep(one.step) } },
      el("b", {}, `step ${one.step}`),
      el("span", {}, one.scores.map((score) => number(score, 2)).join("  ")),
      el("i", {}, visible(one.response).slice(0, 160)),
    ));
  const head = el("div", { class: "detail-head" },
    el("h3", {}, `pinned: ${visible(name)}`),
    el("span", { class: "quiet" }, `in ${counted(found.steps.length, "step")}`),
    el("button", { class: "plain", on: { click: () => togglePin(name) } }, "unpin"));
  fill(pinned, head, el("div", { class: "pins" }, rows));
  markPin();
}

// Loading

async function loadCurves() {
  const signals = state.health.rules.map((rule) => rule.name);
  await Promise.all(
    state.runs.map(async (run) => {
      const { headline: [metric], validation } = state.summary[run];
      const names = [...new Set([metric, validation, ...FEW, ...signals, ...state.added])];
      state.curves[run] = (await ask("series", { run, names: names.join(",") })).curves;
    }),
  );
}

/** Read how far the runs are, and draw the head and the curves; the other panels are stale then. */
async function load() {
  for (const one of await Promise.all(state.runs.map((run) => ask("summary", { run })))) state.summary[one.name] = one;
  state.steps = state.summary[state.run].steps;
  await loadCurves();
  slider.max = String(Math.max(0, state.steps.length - 1));
  head();
  for (const id of Object.keys(bodies)) stale.add(id);
  await drawn("headline");
  setStep(state.step === null || state.isAtEnd ? state.steps.at(-1) ?? null : state.step);
}

async function loadSpread() {
  state.spread[state.run] = await ask("spread", { run: state.run }).catch(() => undefined);
  await drawn("headline");
}

let isBusy = false;
let isChanged = false;
const MOST_WAIT_MS = 10000;
const SHARE = 150; // one part of the time at most goes into reading: whoever looks at a run must not slow it down

/** Read what is new; what happens meanwhile is read after it. */
async function update() {
  isChanged = true;
  if (isBusy) return;
  isBusy = true;
  while (isChanged) {
    isChanged = false;
    const began = performance.now();
    try {
      await load();
      await drawStale();
      await loadSpread();
      await loadVerdicts();
      if (state.pinned) await pin(state.pinned);
    } catch {
      // The server has ended; the mark in the head says so.
    }
    await new Promise((done) => setTimeout(done, Math.min(MOST_WAIT_MS, SHARE * (performance.now() - began))));
  }
  isBusy = false;
}

function changed(news) {
  const known = state.summary[news.run];
  const isSame = known.version === news.version && known.rollouts_changed === news.rollouts;
  if (!isSame || (known.state === "running") !== news.running) update();
}

async function setRun(run) {
  state.run = run;
  state.other = state.runs.find((one) => one !== run);
  state.isAtEnd = false;
  await load();
  await Promise.all([...stale].map(drawn));
  await Promise.all([loadSpread(), loadVerdicts()]);
}

// The frame

const chooser = (id, names, chosen, onChoice) =>
  el("select", { id, "aria-label": id, on: { change: (event) => onChoice(event.target.value) } }, names.map((name) => el("option", { value: name, selected: name === chosen }, visible(name))));

const title = el("h1", {});
const chip = el("span", {});
const recipe = el("span", { class: "quiet recipe" });
const about = el("span", { class: "quiet" });
const alive = el("span", { class: "alive", title: "live" });
const slider = el("input", { type: "range", min: "0", max: "0", id: "slider", "aria-label": "step" });
const stepLabel = el("span", { id: "step", class: "step" });
const tiles = el("div", { class: "tiles" });
const verdicts = el("div", { class: "wrap verdicts" });
const badge = el("a", { href: "#health" });
const curve = el("div", {});
const few = el("div", { class: "charts" });
const options = el("datalist", { id: "metrics" });
const troubles = el("div", { id: "troubles" });
const signals = el("div", { class: "panel-body" });
const pinned = el("div", { id: "pinned" });
const inside = el("div", {});
const busy = el("div", { class: "charts" });
const lanes = el("div", { class: "lanes", id: "lanes" });
const answers = el("div", { id: "answers" });
let rollouts = null;

slider.addEventListener("input", () => setStep(state.steps[Number(slider.value)] ?? null));

const search = el("input", { type: "search", list: "metrics", id: "metric", placeholder: "add a metric  m", title: "with a slash at the end, all that begin with it", "aria-label": "add a metric" });
const smooth = el("input", { type: "range", id: "smooth", min: "0", max: "0.98", step: "0.02", value: "0", title: "a running mean; numbers stay those of the step" });
smooth.addEventListener("input", () => ((state.smooth = Number(smooth.value)), drawn("headline")));
search.addEventListener("change", () => {
  addMetric(search.value);
  search.value = "";
});

function head() {
  const one = state.summary[state.run];
  document.title = `${one.name} · rallypoint`;
  fill(title, state.runs.length > 1 ? chooser("run", state.runs, state.run, setRun) : visible(one.name));
  fill(chip, el("span", { class: `pill ${one.state.replace(" ", "-")}`, title: one.why }, one.state));
  fill(recipe, [one.recipe, one.why && one.state !== "finished" ? ` · ${visible(one.why).slice(0, 160)}` : ""].join(""));
  const families = new Set(one.metrics.map((name) => name.slice(0, name.indexOf("/") + 1)).filter(Boolean));
  fill(options, [...families, ...one.metrics].map((name) => el("option", { value: name })));
  fill(about, isReport ? `report, without a server: ${reportFacts()?.said?.[state.run] ?? ""}` : "");
}

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

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showStep(state.step));

// Keys: what each does, and how `?` tells of it

const ACTS = {
  j: () => move(1),
  k: () => move(-1),
  J: () => move(10),
  K: () => move(-10),
  ArrowRight: () => rollouts?.next(1),
  ArrowLeft: () => rollouts?.next(-1),
  "/": () => rollouts?.focus(),
  m: () => search.focus(),
  p: () => rollouts?.pin(),
  Home: () => setStep(state.steps[0] ?? null),
  End: () => setStep(state.steps.at(-1) ?? null),
  t: () => theme(),
  "?": help,
};
const KEYS = [
  ["j / k", "next, previous step (J / K: ten)"],
  ["← / →", "previous, next rollout"],
  ["/", "search rollouts"],
  ["m", "add a metric"],
  ["p", "pin the prompt, to follow it over the steps"],
  ["Home / End", "first, newest step"],
  ["t", "light or dark"],
  ["?", "this list"],
];

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const isSliders = event.target.type === "range" && /^(Arrow|Home|End|Page)/.test(event.key);
  if (isSliders || !Object.hasOwn(ACTS, event.key)) return;
  event.preventDefault();
  ACTS[event.key]();
});

function help() {
  const dialog = document.getElementById("help");
  const list = KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]);
  fill(dialog, el("h2", {}, "Keys"), el("dl", { class: "facts" }, list), el("form", { method: "dialog" }, el("button", { class: "plain" }, "close")));
  dialog.showModal();
}

function frame() {
  const ids = Object.keys(PANELS).filter((id) => id !== "compare" || state.runs.length > 1);
  const button = (text, run, label) => el("button", { class: "plain", title: label, "aria-label": label, on: { click: run } }, text);
  const links = ids.map((id) => el("a", { href: `#${id}` }, { broke: "crashes", headline: "overview" }[id] ?? id));
  for (const link of [...links, badge]) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById(link.hash.slice(1)).scrollIntoView({ behavior: "smooth" });
    });
  }
  fill(
    document.getElementById("top"),
    el("div", { class: "top-line" }, title, chip, badge, recipe, el("span", { class: "grow" }), about, !isReport && alive, button("◐", () => theme(), "light or dark (t)"), button("?", help, "keys (?)")),
    el("div", { class: "top-line" }, el("nav", {}, links), el("span", { class: "scrub" }, button("‹", () => move(-1), "previous step (k)"), slider, button("›", () => move(1), "next step (j)"), stepLabel)),
  );
  fill(document.getElementById("main"), ids.map(panel));
}

async function start() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept) theme(kept);
  } catch {
    // See `theme`.
  }
  state.runs = (await ask("runs")).runs;
  [state.run, state.other] = state.runs;
  frame();
  const asked = Number(/step=(\d+)/.exec(location.hash)?.[1]);
  if (asked) Object.assign(state, { step: asked, isAtEnd: false });
  await load();
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  for (const id of Object.keys(bodies)) if (stale.has(id)) await drawn(id);
  await Promise.all([loadSpread(), loadVerdicts()]);
  for (const section of document.querySelectorAll("section")) watch.observe(section);
  document.documentElement.dataset.ready = "true";
  follow(changed, (is) => (alive.className = is ? "alive on" : "alive off"));
}

start().catch((error) => fill(document.getElementById("main"), message(error.message, "error")));
