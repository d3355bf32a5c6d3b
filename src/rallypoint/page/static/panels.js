// Health, time, what broke, the batch, provenance, comparison: each a function from facts to elements.

import { LINES, chart, smoothed, spark } from "./charts.js";
import { counted, duration, el, fill, mark, message, number, numeric, percent, table, visible } from "./dom.js";

const ORDER = { bad: 0, watch: 1, ok: 2 };
const KINDS = { rollout: "blue", sample: "blue", group: "blue", reward: "yellow", judge: "orange", logprobs: "orange", values: "orange", learn: "green", train: "green", publish: "purple", load: "purple", weigh: "sky", other: "quiet" };

/** One colour for each kind of work, whatever number stands behind it. */
const colourOf = (name) => KINDS[name.split(/[ _/]/)[0]] ?? "vermilion";

const levelAt = (rule, step) => rule.levels.find(([first, last]) => first <= step && step <= last)?.[2] ?? "ok";

/** Draw the findings at a step; `open` is the key of the one whose evidence is shown. */
export function drawHealth(body, facts, troubles, open, data, { onStep, onOpen }) {
  const at = (rule) => levelAt(rule, data.step);
  const worst = (rule) => rule.levels.reduce((a, [, , b]) => (ORDER[b] < ORDER[a] ? b : a), "ok");
  const rules = facts.rules.toSorted((a, b) => ORDER[at(a)] - ORDER[at(b)] || ORDER[worst(a)] - ORDER[worst(b)]);
  const card = (rule) => {
    const level = at(rule);
    const num = rule.levels.reduce((sum, [first, last]) => sum + last - first + 1, 0);
    const isExcused = (rule.excused ?? []).some(([first, last]) => first <= data.step && data.step <= last);
    const value = data.metrics[rule.name];
    const told = troubles.filter((one) => one.name === rule.name).map((one) => one.words);
    const since = num ? `a concern in ${counted(num, "step")}, first ${rule.levels[0][0]}` : isExcused ? "" : told.length ? `see above: ${told.join(", ")}` : "never a concern";
    const verdict = level !== "ok" ? rule.words : isExcused ? `excused: ${rule.excuse}` : "";
    const [, values] = data.curves?.[rule.name] ?? [[], []];
    return el(
      "button",
      { class: `card ${level}`, data: { signal: rule.name }, "aria-expanded": rule.key === open ? "true" : "false", on: { click: () => onOpen(rule.key === open ? null : rule.key) } },
      el("span", { class: "card-head" }, mark(isExcused ? "excused" : level), rule.signal ?? rule.words),
      el("span", { class: "card-value" }, rule.is_share ? percent(value) : number(value)),
      el("span", { class: "small verdict" }, verdict),
      spark(values, level === "ok" ? "blue" : level === "bad" ? "vermilion" : "orange"),
      el("span", { class: "quiet small" }, since),
    );
  };
  const rule = rules.find((one) => one.key === open);
  fill(body, el("div", { class: "cards" }, rules.map(card)), rule && evidence(rule, data.curves[rule.name] ?? [[], []], onStep));
}

/** Draw what has lasted, worst first: what `rally doctor RUN` says. */
export function drawTroubles(body, facts, { onStep, onOpen, onPrompt }) {
  const told = (one) => {
    const names = one.prompts.slice(0, 3).join(", ");
    const at = names ? one.evidence.lastIndexOf(names) : one.evidence.length;
    const links = one.prompts.slice(0, 3).map((name) => el("button", { class: "plain small", title: "follow this prompt", on: { click: () => onPrompt(name) } }, visible(name)));
    return [visible(one.evidence.slice(0, at)), links, visible(one.evidence.slice(at + names.length))].flat();
  };
  const row = (one) =>
    el(
      "li",
      { class: `trouble ${one.level}${one.follows ? " follows" : ""}` },
      mark(one.level),
      el("button", { class: "words", title: "its meaning and evidence", on: { click: () => onOpen(one) } }, visible(one.words)),
      one.first !== null && el("button", { class: "plain small", on: { click: () => onStep(one.first) } }, one.last === null || one.last === one.first ? `step ${one.first}` : `steps ${one.first} to ${one.last}`),
      el("span", { class: "quiet" }, told(one)),
      el("span", { class: "advice" }, visible(one.advice)),
    );
  fill(body, facts.troubles.length ? el("ul", { class: "troubles" }, facts.troubles.map(row)) : message("no trouble has lasted, of those that rally doctor knows"));
}

function evidence(rule, [steps, values], onStep) {
  const limits = (rule.thresholds ?? []).map((value, at) => [value, at ? "vermilion" : "orange"]);
  const [watch, bad] = (rule.thresholds ?? []).map((value) => number(value));
  const told = [
    ["what it means", rule.reason],
    ["what to do", rule.advice],
    ["excused while", rule.excused?.length && rule.excuse],
    ["thresholds", bad && `watch ${rule.worse} ${watch}, bad ${rule.worse} ${bad}`],
  ].filter(([, value]) => value);
  const first = rule.levels[0]?.[0];
  return el(
    "div",
    { class: "evidence" },
    chart({ title: rule.name, lines: [{ label: rule.name, steps, values, colour: "blue" }], limits, height: 170, onStep, wide: true }),
    el(
      "dl",
      { class: "facts" },
      told.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
      first !== undefined && [el("dt", {}, "began"), el("dd", {}, el("button", { class: "plain", on: { click: () => onStep(first) } }, `step ${first}`))],
    ),
  );
}

/** Draw where time goes; `busy` has charts of its own, and `lanes` is filled by `drawLanes`. */
export function drawTime(body, facts, busy, lanes, onStep) {
  if (!facts.steps.length) return fill(body, message("no step is done yet"));
  const hasOther = facts.other.some((value) => value > 1e-3);
  const names = [...Object.keys(facts.phases), ...(hasOther ? ["other"] : [])];
  const columns = [...Object.values(facts.phases), ...(hasOther ? [facts.other] : [])];
  let below = facts.steps.map(() => 0);
  const stacked = columns.map((column, at) => {
    below = below.map((sum, place) => sum + (column[place] ?? 0));
    return { label: names[at], steps: facts.steps, values: below, shown: column, colour: colourOf(names[at]), fill: colourOf(names[at]), width: 0.5 };
  });
  const totals = columns.map((column) => column.reduce((sum, value) => sum + (value ?? 0), 0));
  const whole = totals.reduce((a, b) => a + b, 0) || 1;
  const shares = names.map((name, at) => el("span", { class: `share ${colourOf(name)}` }, `${name} `, el("b", {}, percent(totals[at] / whole))));
  const slow = facts.slow_ranks.map((one) => message(`rollout rank ${one.rank}${where(facts, one.rank)} was a straggler in ${one.steps} of ${one.of} steps: over 1.5 times the median of the others`, "warn"));
  const few = facts.stragglers.slice(-5).map((one) => el("button", { class: "plain", on: { click: () => onStep(one.step) } }, `step ${one.step}: rank ${one.rank}, ${duration(one.seconds)} (the others ${duration(one.median)})`));
  return fill(
    body,
    el("div", { class: "shares" }, shares),
    el("div", { class: "charts two" }, chart({ title: facts.each > 1 ? `seconds of a step, means of ${facts.each}` : "seconds of a step", lines: stacked.toReversed(), height: 190, onStep, low: 0 }), chart({ title: "tokens per second", lines: [{ label: "tokens/s", steps: facts.steps, values: facts.tokens_per_s, colour: "blue" }], height: 190, onStep, low: 0 })),
    slow.length ? slow : facts.ranks > 1 ? message(`no rollout rank of ${facts.ranks} took over 1.5 times the median of the others`) : null,
    few.length > 0 && el("p", { class: "wrap" }, few),
    busy,
    lanes,
    el("div", { class: "halves" }, memory(facts.memory), waste(facts.waste, facts.tokens_without_signal)),
  );
}

const where = (facts, rank) => (facts.processes.rollout?.[rank] ? ` (process ${facts.processes.rollout[rank]})` : "");

/** Draw the bars of a step on one axis: a lane for each rank, in which what overlaps stands in rows. */
export function drawLanes(body, facts) {
  if (!facts.lanes.length) return fill(body, message(`step ${facts.step} is not done`));
  const bars = facts.lanes.flatMap((lane) => lane.rows.flat());
  const isSlow = (lane) => lane.role.startsWith("rollout") && lane.name.replace(/ \(.*/, "") === `rank ${facts.straggler}`;
  const whole = Math.max(facts.seconds, ...bars.map((bar) => bar.to)) || 1;
  const bar = (one, lane, height) => {
    const from = Math.max(0, one.from);
    const place = { left: `${(100 * from) / whole}%`, width: `${Math.max(0.15, (100 * (one.to - from)) / whole)}%` };
    return el(
      "span",
      { class: `bar ${colourOf(one.name)}`, title: `${visible(one.name)}: ${duration(one.to - one.from)}`, style: { ...place, ...height } },
      (one.to - from) / whole > 0.08 && lane.rows.length === 1 ? visible(one.name) : "",
    );
  };
  const row = (lane) => {
    const heights = lane.rows.map((_, at) => (lane.rows.length > 1 ? { top: `${(100 * at) / lane.rows.length}%`, bottom: `${100 - (100 * (at + 1)) / lane.rows.length}%` } : {}));
    const name = lane.role === "driver" ? lane.name : `${lane.role.replace("rollout groups", "rollout")} ${lane.name.replace(/ \(.*/, "")}${isSlow(lane) ? ", slow" : ""}`;
    return el("div", { class: isSlow(lane) ? "lane slow" : "lane" }, el("span", { class: "lane-name", title: visible(lane.name) }, visible(name)), el("span", { class: "lane-bars", style: { height: `${Math.min(96, Math.max(20, 6 * lane.rows.length))}px` } }, lane.rows.flatMap((bars, at) => bars.map((one) => bar(one, lane, heights[at])))));
  };
  return fill(body, el("h3", {}, `step ${facts.step}, ${duration(facts.seconds)}`), facts.lanes.map(row), el("div", { class: "lane-axis quiet" }, el("span", {}, "0 s"), el("span", {}, duration(whole))));
}

function memory(roles) {
  const most = Math.max(...roles.map((one) => Math.max(one.peak, one.planned ?? 0)), 1e-9);
  const row = (one) => [
    one.role,
    el("span", { class: "meter", title: "peak, and the plan as a line" }, el("i", { style: { width: `${(100 * one.peak) / most}%` } }), one.planned !== null && el("u", { style: { left: `${(100 * one.planned) / most}%` } })),
    `${number(one.peak, 3)} GiB`,
    one.planned === null ? "–" : `${number(one.planned, 3)} GiB`,
  ];
  return el("div", {}, el("h3", {}, "memory of a process"), roles.length ? table(["role", "", numeric("peak"), numeric("planned")], roles.map(row)) : message("no peaks were measured"));
}

function waste(facts, withoutSignal) {
  if (facts.error) return el("div", {}, el("h3", {}, "waste"), message(facts.error, "error"));
  const rows = facts.wastes.map((one) => [`${one.cause}${one.num ? ` (${number(one.num)} ${one.unit}${one.num > 1 ? "s" : ""})` : ""}`, number(one.tokens), duration(one.seconds)]);
  if (withoutSignal) rows.push(["trained on, in groups without signal (about)", number(withoutSignal), "–"]);
  const share = facts.seconds ? facts.seconds_wasted / facts.seconds : 0;
  return el("div", {}, el("h3", {}, `bought nothing: ${percent(share)} of ${duration(facts.seconds)}`), rows.length ? table(["cause", numeric("tokens"), numeric("time")], rows) : message("nothing was wasted"));
}

const clock = (time) => new Date(1000 * time).toISOString().replace("T", " ").slice(0, 19);

export function drawBroken(body, facts, onStep) {
  const starts = facts.starts.map((one, at) => [`${at + 1}`, clock(one.time), one.first ? `after step ${one.first}` : "from the beginning", duration(one.until - one.time), el("span", { class: `pill ${one.how}` }, one.how)]);
  const folded = (text) => el("details", {}, el("summary", {}, visible(text.split("\n")[0])), el("pre", {}, visible(text)));
  const why = facts.starts.filter((one) => one.why).map((one) => folded(one.why));
  const lost = facts.lost.map((one) => [clock(one.time), one.kind === "RoleLost" ? `lost ${one.role}, rank ${one.rank}${one.step === null ? "" : `, in step ${one.step}`}` : `there again after ${duration(one.seconds)}`, visible(one.why ?? "")]);
  const failed = facts.failed.map((one) => [
    `${one.what === "rollout" ? "rollout failed" : "no score"}: ${visible(one.kind)}`,
    number(one.num),
    one.step === null ? "–" : el("button", { class: "plain small", on: { click: () => onStep(one.step) } }, `step ${one.step}`),
    one.said ? folded(one.said) : "",
  ]);
  const nothing = facts.starts.length < 2 && !why.length && !lost.length && !failed.length && !facts.damage;
  fill(
    body,
    facts.damage && message(facts.damage, "error"),
    nothing && message("nothing broke: one start, no lost process, no failed rollout"),
    table([numeric("start"), "UTC", "went on", numeric("lasted"), "ended"], starts),
    why,
    lost.length > 0 && [el("h3", {}, "lost processes"), table(["UTC", "what", "error"], lost)],
    failed.length > 0 && [el("h3", {}, "failed samples"), table(["kind", numeric("how many"), "first in", "the first message, with a traceback if there is one"], failed)],
    facts.aside.length > 0 && message(`set aside in checkpoints/: ${facts.aside.join(", ")}`),
    facts.notes.length > 0 && el("details", {}, el("summary", {}, `${facts.notes.length} messages`), el("ul", { class: "notes" }, facts.notes.map((one) => el("li", {}, el("span", { class: "quiet" }, `${clock(one.time)} `), visible(one.text))))),
  );
}

/** Draw how prompts become rows, mini-batches and micro-batches. */
export function drawBatch(body, facts) {
  const box = (value, words, detail) => el("div", { class: "flow-box" }, el("b", {}, number(value)), el("span", {}, words), detail && el("i", {}, detail));
  const op = (text) => el("div", { class: "flow-op" }, text);
  const learner = (one) =>
    el(
      "div",
      { class: "flow" },
      el("h3", {}, one.role),
      box(facts.num_rows * one.epochs, one.epochs > 1 ? `rows in ${one.epochs} epochs` : "rows"),
      op(`÷ ${one.mini_batches}`),
      box(one.rows, "rows a mini-batch", `${one.updates} optimizer ${one.updates > 1 ? "steps" : "step"}`),
      op(`÷ ${one.parts}`),
      box(Math.ceil(one.rows / one.parts), "rows a rank", `${one.ranks} ${one.ranks > 1 ? "ranks" : "rank"}`),
      op("cut at the cap"),
      box(one.micro_batches, "micro-batches at most", `${number(facts.cap)} tokens each`),
    );
  fill(
    body,
    el("div", { class: "flow" }, el("h3", {}, "a step"), box(facts.num_prompts, "prompts"), op(`× ${facts.group_size}`), box(facts.num_rows, "rollouts, a row each", `≤ ${number(facts.max_row_tokens)} tokens`), op("="), box(facts.measured["rollout/num_tokens"] ?? facts.measured["actor/num_tokens"], "tokens in the newest step", `at most ${number(facts.max_tokens)}`)),
    facts.learners.map(learner),
    message(`ranks: ${facts.roles.map((one) => `${one.role} × ${one.ranks}`).join(", ")}; ${percent(facts.measured["actor/without_signal"] ?? null)} of the newest step's rows had no signal`),
  );
}

export function drawProvenance(body, facts) {
  const search = el("input", { type: "search", placeholder: "search keys", "aria-label": "search keys" });
  const all = el("input", { type: "checkbox", id: "all-keys" });
  const place = el("div", {});
  const shown = (value) => visible(typeof value === "string" ? value : JSON.stringify(value));
  const draw = () => {
    const rows = facts.config.filter((one) => (all.checked || one.changed) && one.key.includes(search.value));
    fill(place, table(["key", "this run", "default"], rows.map((one) => [el("code", {}, one.key), el("code", { class: one.changed ? "changed" : "" }, shown(one.value)), el("code", { class: "quiet" }, shown(one.default))])));
  };
  search.addEventListener("input", draw);
  all.addEventListener("change", draw);
  draw();
  const files = Object.entries(facts.files).flatMap(([key, named]) => Object.entries(named).map(([name, digest]) => [key, visible(name), el("code", {}, digest.slice(0, 16))]));
  fill(
    body,
    el("dl", { class: "facts" }, [["seed", facts.seed], ["machine", facts.machine], ["folder", facts.folder], ["versions", Object.entries(facts.software).map((pair) => pair.join(" ")).join(", ")], ["command line", facts.overrides.join(" ") || "no overrides"]].flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(value))])),
    el("div", { class: "tools" }, search, el("label", {}, all, " also keys at their default"), el("span", { class: "quiet" }, `${facts.config.filter((one) => one.changed).length} of ${facts.config.length} keys differ from their default`)),
    place,
    files.length > 0 && el("details", {}, el("summary", {}, `${files.length} files that decide the weights`), table(["key", "file", "digest"], files)),
    facts.checkpoints.length > 0 && el("details", {}, el("summary", {}, `${facts.checkpoints.length} checkpoints`), table([numeric("step"), "digest of its weights"], facts.checkpoints.map((one) => [number(one.step), el("code", {}, one.weights)]))),
  );
}

/** Draw what two runs differ in; `answers` is filled by `drawAnswers`. */
export function drawComparison(body, found, [a, b], choice, answers, onStep) {
  const shown = (value) => visible(value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : value);
  const changes = (title, list) => list.length > 0 && [el("h3", {}, title), table(["key", a, b], list.map((one) => [el("code", {}, one.key), el("code", {}, shown(one.of_a)), el("code", {}, shown(one.of_b))]))];
  const { first } = found;
  fill(
    body,
    choice && el("label", { class: "quiet" }, "compared with ", choice),
    first ? el("p", { class: "message warn", id: "first-difference" }, "first difference: ", el("button", { class: "plain", on: { click: () => onStep(first.step) } }, `step ${first.step}`), `, ${first.what}: ${shown(first.of_a)} | ${shown(first.of_b)}`) : message(found.num_compared ? `equal in the ${found.num_compared} steps that both have done` : "no step that both have done"),
    found.where.map((line) => el("pre", { class: "small" }, visible(line))),
    changes("config", found.config),
    changes("config, on which no weight depends", found.free),
    changes("files", found.files),
    changes("packages and machine", found.around),
    answers,
  );
}

/** Draw the answers of two runs to the same prompts; `found` has the outcome of asking each for its rollouts. */
export function drawAnswers(body, runs, step, found) {
  if (found.some((one) => one.status === "rejected")) return fill(body, message(`no answers side by side: not both runs have rollouts of step ${step}`));
  const of = found.map((one) => new Map(one.value.rows.map((row) => [`${row.name} · ${row.sample_index}`, row])));
  const both = [...of[0].keys()].filter((key) => of[1].has(key)).slice(0, 6);
  if (!both.length) return fill(body, message(`step ${step}: no prompt that both runs sampled`));
  const cell = (row) => el("div", {}, el("b", {}, number(row.score, 3)), el("pre", { class: "small" }, visible(row.response)));
  return fill(body, el("h3", {}, `the same prompts in step ${step}`), table(["prompt", ...runs], both.map((key) => [visible(key), cell(of[0].get(key)), cell(of[1].get(key))])));
}

/** Return a chart of a metric over all runs. */
export function metricChart(name, perRun, onStep, smooth, remove) {
  const lines = perRun.map(({ run, curves }, at) => {
    const [steps, values] = curves[name] ?? [[], []];
    return { label: run, steps, values, colour: LINES[at % LINES.length] };
  });
  const node = chart({ title: name, lines: smoothed(lines, smooth), height: 130, onStep });
  if (remove) node.querySelector(".chart-head").append(el("button", { class: "plain remove", title: "remove", "aria-label": `remove ${name}`, on: { click: remove } }, "×"));
  return node;
}
