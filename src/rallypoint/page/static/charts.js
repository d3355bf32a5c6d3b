// Charts over steps. All share one cursor, and a line at the step that the page is at.

import uPlot from "./vendor/uPlot.esm.js";
import { el, number } from "./dom.js";

const drawn = new Set();
let current = null;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Between two marks of steps: there are no halves of one. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));

/** Colours of several lines, apart for every kind of colour vision (Okabe and Ito). */
export const LINES = ["blue", "vermilion", "green", "purple", "orange", "sky"];

function stepLine(plot) {
  if (current === null) return;
  const x = Math.round(plot.valToPos(current, "x", true));
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  plot.ctx.save();
  plot.ctx.strokeStyle = colour("ink");
  plot.ctx.globalAlpha = 0.55;
  plot.ctx.lineWidth = devicePixelRatio;
  plot.ctx.beginPath();
  plot.ctx.moveTo(x, top);
  plot.ctx.lineTo(x, top + height);
  plot.ctx.stroke();
  plot.ctx.restore();
}

function levels(limits) {
  return (plot) => {
    for (const [value, name] of limits) {
      const y = Math.round(plot.valToPos(value, "y", true));
      const { left, top, width, height } = plot.bbox;
      if (!(y >= top && y <= top + height)) continue;
      plot.ctx.save();
      plot.ctx.strokeStyle = colour(name);
      plot.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      plot.ctx.lineWidth = devicePixelRatio;
      plot.ctx.beginPath();
      plot.ctx.moveTo(left, y);
      plot.ctx.lineTo(left + width, y);
      plot.ctx.stroke();
      plot.ctx.restore();
    }
  };
}

/** Move the line of the step in every chart. */
export function showStep(step) {
  current = step;
  for (const one of drawn) {
    if (!one.node.isConnected) forget(one);
    else {
      one.plot.redraw(false, false);
      one.label();
    }
  }
}

function forget(one) {
  drawn.delete(one);
  one.watch.disconnect();
  one.plot.destroy();
}

function axis(extra) {
  return {
    stroke: () => colour("quiet"),
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    ...extra,
  };
}

const nearest = (steps, step) => {
  let best = null;
  for (let at = 0; at < steps.length; at += 1) if (best === null || Math.abs(steps[at] - step) < Math.abs(steps[best] - step)) best = at;
  return best;
};

/** Return lines with a running mean of each before them: every value counts `weight` of the one after it. */
export function smoothed(lines, weight) {
  if (!weight) return lines;
  const mean = (values) => {
    let [sum, total] = [0, 0];
    return values.map((value) => {
      if (!Number.isFinite(value)) return null;
      [sum, total] = [weight * sum + value, weight * total + 1];
      return sum / total;
    });
  };
  const curves = lines.filter((line) => !line.points && !line.hidden);
  return [...lines.map((line) => ({ ...line, faint: curves.includes(line) })), ...curves.map((line) => ({ ...line, label: "", values: mean(line.values) }))];
}

/**
 * Return a chart.
 *
 * lines: [{label, steps, values, colour, points, fill, width, dash, hidden, faint}]; one without a label has no value above
 * the chart. bands: [[upper, lower]] places of lines. limits: [[value, colour]]; onStep: called with the step that was
 * clicked; noun: what stands on the axis, and shares the cursor if it is the step.
 */
export function chart({ title, note = "", lines, bands = [], limits = [], height = 150, onStep, low = null, wide = false, noun = "step" }) {
  const head = el("div", { class: "chart-head" }, el("span", { class: "chart-title" }, title));
  const values = el("span", { class: "chart-values" });
  head.append(values);
  const place = el("div", { class: "chart-place" });
  const node = el("figure", { class: wide ? "chart wide" : "chart", "aria-label": title }, head, place, note && el("figcaption", {}, note));
  const tables = lines.map((line) => [line.steps, line.values]);
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[], []];
  const series = lines.map((line) => ({
    label: line.label,
    stroke: line.hidden ? "transparent" : () => colour(line.colour) + (line.faint ? "50" : ""),
    fill: line.fill ? () => colour(line.fill) : undefined,
    width: line.points || line.hidden ? 0 : (line.width ?? 1.75),
    dash: line.dash,
    paths: line.points ? () => null : undefined,
    spanGaps: true,
    points: { show: Boolean(line.points) || (line.steps.length < 3 && !line.hidden), size: 7, fill: () => colour(line.colour) },
  }));
  const one = { node, plot: null, watch: null, label: null };
  const options = {
    width: 300,
    height,
    legend: { show: false },
    cursor: { sync: noun === "step" ? { key: "steps", setSeries: false } : undefined, y: false, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: (_, from, to) => span(from, to, low) } },
    series: [{}, ...series],
    bands: bands.map(([upper, lower]) => ({ series: [upper + 1, lower + 1], fill: () => colour("band") })),
    axes: [axis({ size: 26, space: 60, incrs: WHOLE }), axis({ size: 54, space: 28, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) })],
    hooks: { draw: noun === "step" ? [levels(limits), stepLine] : [], setCursor: [(plot) => one.label?.(plot.cursor.idx)] },
  };
  one.plot = new uPlot(options, data, place);
  one.label = (at) => {
    const steps = one.plot.data[0];
    const where = at ?? (noun === "step" ? nearest(steps, current ?? steps[steps.length - 1]) : null);
    const isElsewhere = (at ?? null) === null && current !== null && where !== null && steps[where] !== current;
    values.replaceChildren(
      ...(typeof at === "number" ? [el("span", {}, `${noun} ${steps[at]}`)] : []),
      ...lines.flatMap((line, index) => {
        if (!line.label) return [];
        const value = where === null ? null : (line.shown ?? one.plot.data[index + 1])[where];
        if (value === null || value === undefined) return [];
        const told = `${lines.filter((other) => other.label).length > 1 ? `${line.label} ` : ""}${isElsewhere ? `step ${steps[where]}: ` : ""}`;
        return [el("span", { class: `key ${line.colour}` }, told, el("b", {}, number(value)))];
      }),
    );
  };
  let was = 0;
  one.watch = new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 40 && width !== was) one.plot.setSize({ width: (was = width), height });
  });
  one.watch.observe(place);
  let from = null;
  place.addEventListener("pointerdown", (event) => (from = event.clientX));
  place.addEventListener("click", (event) => {
    if (from === null || Math.abs(event.clientX - from) > 3 || one.plot.cursor.idx === null) return;
    onStep?.(one.plot.data[0][one.plot.cursor.idx]);
  });
  drawn.add(one);
  one.label();
  return node;
}

function span(from, to, low) {
  if (from === null || to === null) return [0, 1];
  const bottom = low === null ? from : Math.min(low, from);
  const room = (to - bottom) * 0.06 || Math.abs(to) * 0.1 || 0.5;
  const floor = low ?? (from >= 0 && from <= 0.4 * to ? 0 : null);
  return [floor !== null && from >= floor ? floor : bottom - room, to + room];
}

/** Return a small curve without axes. */
export function spark(values, name = "blue") {
  const there = values.filter((value) => Number.isFinite(value));
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  node.setAttribute("viewBox", "0 0 100 24");
  node.setAttribute("preserveAspectRatio", "none");
  node.classList.add("spark", name);
  if (there.length < 2) return node;
  const [low, high] = [Math.min(...there), Math.max(...there)];
  const path = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const stride = Math.max(1, Math.floor(there.length / 100));
  const few = there.filter((_, at) => at % stride === 0);
  path.setAttribute("points", few.map((value, at) => `${(100 * at) / (few.length - 1)},${22 - (20 * (value - low)) / (high - low || 1)}`).join(" "));
  node.append(path);
  return node;
}
