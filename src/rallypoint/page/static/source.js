// Where panels get their facts: from the server, or in a report from the block of data in the file itself.

const block = document.getElementById("data");
const embedded = block ? JSON.parse(block.textContent) : null;

export const isReport = embedded !== null;
export const reportFacts = () => embedded?.report;

const given = (asked) => Object.entries(asked).filter(([, value]) => value !== undefined && value !== null && value !== "");

/** Return what a panel shows; throws an Error that says why there is nothing. */
export async function ask(name, asked = {}) {
  const found = isReport ? fromReport(name, asked) : await fromServer(name, asked);
  if (found?.error) throw new Error(typeof found.error === "string" ? found.error : found.error.message);
  return found;
}

async function fromServer(name, asked) {
  let response;
  try {
    response = await fetch(`/api/${name}?${new URLSearchParams(given(asked))}`);
  } catch {
    throw new Error("rally view does not answer: has it ended?");
  }
  return response.json();
}

// A report. Questions are keys of its data, as `report.py` writes them.

function kept(name, asked) {
  const words = given(asked).map(([key, value]) => [key, String(value)]);
  return embedded[JSON.stringify([name, ...words.sort(([a], [b]) => (a < b ? -1 : 1))])];
}

function fromReport(name, asked) {
  const { run, step } = asked;
  const rollouts = asked.kind === "validation" ? undefined : kept("rollouts", { run, step });
  const steps = embedded.report.steps[run] ?? [];
  const missing = `this report has rollouts of the steps ${steps.join(", ") || "none"}, and of no validation`;
  if (name === "series") return curves(run, asked.names);
  if (name === "values") return kept(name, asked) ?? valuesOf(run, step);
  if (name === "prompt") return { name: asked.name, steps: steps.flatMap((one) => ofPrompt(run, one, asked.name)) };
  if (name === "rollouts") return rollouts ? (rollouts.error ? rollouts : filtered(rollouts, asked)) : { error: missing };
  if (name === "group" && rollouts?.rows) {
    const rows = rollouts.rows.filter((row) => row.prompt_index === asked.prompt);
    return { ...rows[0], rows };
  }
  if (name === "rollout") return kept(name, asked) ?? { error: "the tokens of this rollout are not in the report: rally view RUN has all" };
  return kept(name, asked) ?? { error: step === undefined ? "this is not in the report" : `this report has the steps ${steps.join(", ")}` };
}

/** Tell whether a rollout can be shown token by token: a report has those of a few. */
export const hasTokens = (run, step, place) => !isReport || kept("rollout", { run, step, place }) !== undefined;

/** Return how many scores there are, and their p10, median and p90. */
function quantiles(rows) {
  const scores = rows.map((row) => row.score).filter((score) => score !== null).sort((a, b) => a - b);
  const at = (share) => {
    const place = share * (scores.length - 1);
    const low = Math.floor(place);
    return scores.length ? scores[low] + (place - low) * ((scores[low + 1] ?? scores[low]) - scores[low]) : null;
  };
  return [scores.length, at(0.1), at(0.5), at(0.9)];
}

function curves(run, names) {
  const all = kept("series", { run, points: 1000 });
  if (!names || all.error) return all;
  const wanted = names.split(",");
  return { curves: Object.fromEntries(wanted.map((name) => [name, all.curves[name] ?? [[], []]])) };
}

/** Return the numbers of a step of which the report has no more than its curves. */
function valuesOf(run, step) {
  const metrics = {};
  const validation = {};
  for (const [name, [steps, values]] of Object.entries(curves(run).curves ?? {})) {
    const at = steps.indexOf(step);
    if (at >= 0) metrics[name] = values[at];
    const before = steps.findLastIndex((one) => one <= step);
    if (name.startsWith("validation/") && before >= 0) validation[name] = values[before];
  }
  return { step, metrics, validation };
}

function filtered(whole, asked) {
  const wanted = (asked.search ?? "").toLowerCase();
  const holds = (row) => [row.name, row.prompt, row.response, row.failure, row.answer].some((text) => (text ?? "").toLowerCase().includes(wanted));
  const isKept = (row) => !(asked.only in whole.filters) || row.tags.includes(asked.only);
  const rows = whole.rows.filter((row) => isKept(row) && (!wanted || holds(row)));
  const [name, sign] = (asked.sort ?? "batch").startsWith("-") ? [asked.sort.slice(1), -1] : [asked.sort ?? "batch", 1];
  const of = name === "batch" ? "place" : name;
  rows.sort((a, b) => (a[of] === null) - (b[of] === null) || sign * ((a[of] ?? 0) - (b[of] ?? 0)));
  const offset = Number(asked.offset ?? 0);
  return { ...whole, kept: whole.rows.length, found: rows.length, scores: quantiles(rows), rows: rows.slice(offset, offset + Number(asked.limit ?? 25)) };
}

function ofPrompt(run, step, name) {
  const rows = (kept("rollouts", { run, step })?.rows ?? []).filter((row) => row.name === name);
  const [first] = rows;
  return first ? [{ step, prompt: first.prompt_index, scores: rows.map((row) => row.score), response: first.response }] : [];
}

/** Call back for every change of a run, and whether there is a connection; a page that nobody looks at has none. */
export function follow(onChange, onState) {
  if (isReport) return;
  let stream = null;
  const connect = () => {
    stream?.close();
    stream = null;
    if (document.hidden) return;
    stream = new EventSource("/live");
    stream.onmessage = (event) => onChange(JSON.parse(event.data));
    stream.onopen = () => onState(true);
    stream.onerror = () => onState(false);
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}
