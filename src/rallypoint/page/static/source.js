// Where panels get their facts: from the server, or in a report from the block of data in the file itself.

const block = document.getElementById("data");
const embedded = block ? JSON.parse(block.textContent) : null;

export const isReport = embedded !== null;
export const reportFacts = () => embedded?.report;

function keyed(name, asked) {
  const pairs = Object.entries(asked).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const words = new URLSearchParams(pairs.map(([key, value]) => [key, String(value)]));
  words.sort();
  return pairs.length ? `${name}?${words}` : name;
}

/** Return what a panel shows; throws an Error that says why there is nothing. */
export async function ask(name, asked = {}) {
  const found = isReport ? fromReport(name, asked) : await fromServer(keyed(name, asked));
  if (found?.error) throw new Error(typeof found.error === "string" ? found.error : found.error.message);
  return found;
}

async function fromServer(key) {
  let response;
  try {
    response = await fetch(`/api/${key}`);
  } catch {
    throw new Error("rally view does not answer: has it ended?");
  }
  return response.json();
}

function fromReport(name, asked) {
  const { run, step } = asked;
  if (name === "series") {
    const all = embedded[keyed("series", { run, points: 1000 })];
    if (!all || all.error) return all ?? { error: "not in this report" };
    const names = (asked.names ?? "").split(",").filter(Boolean);
    const columns = Object.fromEntries(names.map((one) => [one, all.columns[one] ?? all.steps.map(() => null)]));
    return { steps: all.steps, columns: names.length ? columns : all.columns };
  }
  if (name === "rollouts" && asked.kind !== "validation") return filtered(embedded[keyed(name, { run, step })], asked);
  if (name === "group") {
    const rows = (embedded[keyed("rollouts", { run, step })]?.rows ?? []).filter((row) => row.prompt_index === asked.prompt);
    if (rows.length) return { ...rows[0], rows };
  }
  if (name === "prompt") return { name: asked.name, steps: pinned(run, asked.name) };
  const kept = embedded.report?.steps?.[run] ?? [];
  const missing = { error: `not in this report, which has rollouts of the steps ${kept.join(", ") || "none"}` };
  return embedded[keyed(name, asked)] ?? missing;
}

const TESTS = {
  failed: (row) => row.failure !== null,
  truncated: (row) => row.finish_reason === "length",
  "no signal": (row) => row.advantage === 0 || row.replaced,
  trained: (row) => row.advantage !== null && row.advantage !== 0,
  replaced: (row) => row.replaced,
  empty: (row) => row.length <= 1 || !row.response.trim(),
};

function filtered(whole, asked) {
  if (!whole) {
    const kept = embedded.report?.steps?.[asked.run] ?? [];
    return { error: `this report has rollouts of the steps ${kept.join(", ") || "none"}` };
  }
  if (whole.error) return whole;
  const wanted = (asked.search ?? "").toLowerCase();
  const holds = (row) => [row.name, row.prompt, row.response, row.failure, row.answer].some((text) => (text ?? "").toLowerCase().includes(wanted));
  const test = TESTS[asked.only] ?? (() => true);
  let rows = whole.rows.filter((row) => test(row) && (!wanted || holds(row)));
  const [name, sign] = (asked.sort ?? "batch").startsWith("-") ? [asked.sort.slice(1), -1] : [asked.sort ?? "batch", 1];
  const of = name === "batch" ? "place" : name;
  rows = rows.toSorted((a, b) => (a[of] === null) - (b[of] === null) || sign * ((a[of] ?? 0) - (b[of] ?? 0)));
  const offset = Number(asked.offset ?? 0);
  return { ...whole, found: rows.length, rows: rows.slice(offset, offset + Number(asked.limit ?? 25)) };
}

function pinned(run, name) {
  const steps = embedded.report?.steps?.[run] ?? [];
  return steps.flatMap((step) => {
    const rows = (embedded[keyed("rollouts", { run, step })]?.rows ?? []).filter((row) => row.name === name);
    const first = rows[0];
    return first ? [{ step, prompt: first.prompt_index, scores: rows.map((row) => row.score), response: first.response }] : [];
  });
}

/** Call back for every change of a run; a connection that was lost is made again. */
export function follow(onChange, onState) {
  if (isReport) return;
  const stream = new EventSource("/live");
  stream.onmessage = (event) => onChange(JSON.parse(event.data));
  stream.onopen = () => onState(true);
  stream.onerror = () => onState(false);
}
