"use strict";

// Charts of runs: curves over steps, tokens or time, and progress through the days.

const DASHES = ["solid", "dot", "dash", "dashdot", "longdash", "longdashdot"];
const TITLES = { step: "step", tokens: "tokens", seconds: "training time" };
const UNITS = [
  [86400 * 3, 86400, "days"],
  [3600 * 2, 3600, "hours"],
  [60 * 5, 60, "minutes"],
  [0, 1, "seconds"],
];
// How events look: a symbol of Plotly, a color of the page.
const MARKS = {
  started: ["triangle-right", "good"],
  saved: ["line-ns", "quiet"],
  spike: ["x-thin", "warn"],
  skipped: ["circle-open", "warn"],
  rollback: ["triangle-left", "bad"],
  stopped: ["square", "quiet"],
  complete: ["star", "good"],
  failed: ["x", "bad"],
};
// The pale curves behind smoothed ones, and events, are in the way where there are many runs.
const MOST_WITH_MORE = 6;

// Return the steps over which curves are smoothed: 0.05% to 20% of the longest run.
function smoothingWindow() {
  if (!data || !settings.smooth) return 0;
  return Math.max(1, Math.round(data.steps * 0.0005 * 400 ** (settings.smooth / 100)));
}

function shownRuns() {
  return data.runs
    .map((run, index) => ({ run, index: run.place ?? index }))
    .filter(({ index }) => !settings.hidden.has(index));
}

// Return the x axis, and a function from a run and its steps to places on it.
function xAxis() {
  const longest = Math.max(1, ...data.runs.map((run) => run.axes.seconds.at(-1) ?? 0));
  const [, seconds, unit] = UNITS.find(([from]) => longest >= from);
  const scale = settings.x === "seconds" ? seconds : 1;
  const title = settings.x === "seconds" ? `${TITLES.seconds}, ${unit}` : TITLES[settings.x];
  const place = (run, steps) =>
    settings.x === "step"
      ? steps
      : steps.map((step) => interpolated(run.axes.step, run.axes[settings.x], step) / scale);
  const axis = {
    type: settings.logx ? "log" : "linear",
    title: { text: title, standoff: 6 },
    tickformat: settings.x === "tokens" ? "~s" : settings.logx ? "" : ",~r",
    hoverformat: settings.x === "tokens" ? ".4~s" : settings.x === "step" ? ",.0f" : ",.2f",
  };
  if (settings.logx) axis.dtick = 1;
  return { axis, place };
}

function yAxis(spec) {
  if (settings.logy && spec.log) return { type: "log", tickformat: "~r", nticks: 6 };
  if (spec.stacked) return { rangemode: "tozero", tickformat: ",~r" };
  return { tickformat: ",~r", rangemode: spec.from_zero ? "tozero" : "normal" };
}

// Return the mean of the values around, with weights that fall off exponentially over `steps`.
function smoothed(xs, ys, steps) {
  const known = ys.flatMap((y, i) => (y === null ? [] : [i]));
  // A value stands for the steps since the one before.
  const widths = known.map((i, n) => (n ? Math.max(xs[i] - xs[known[n - 1]], 0) : 1));
  const sums = new Float64Array(known.length),
    weights = new Float64Array(known.length);
  for (const way of [1, -1]) {
    let sum = 0,
      weight = 0,
      before = null;
    for (let n = way > 0 ? 0 : known.length - 1; n >= 0 && n < known.length; n += way) {
      const i = known[n],
        width = widths[n];
      const kept = before === null ? 0 : Math.exp(-Math.abs(xs[i] - before) / steps);
      sum *= kept;
      weight *= kept;
      sums[n] += sum; // what lies on this side; the value itself is added once
      weights[n] += weight;
      sum += width * ys[i];
      weight += width;
      before = xs[i];
    }
  }
  const result = ys.map(() => null);
  known.forEach((i, n) => {
    result[i] = (sums[n] + widths[n] * ys[i]) / (weights[n] + widths[n]);
  });
  return result;
}

KINDS.curves = (spec) => {
  const shown = shownRuns(),
    alone = data.runs.length === 1;
  if (spec.stacked && !alone) return timeOfSteps(spec, shown);
  const { axis, place } = xAxis();
  const steps = spec.smooth ? smoothingWindow() : 0;
  const traces = [],
    lines = [];
  let drawn = 0,
    rows = 0,
    notFinite = 0;
  for (const { run, index } of shown)
    spec.names.forEach((name, at) => {
      const curve = run.curves[name];
      if (!curve) return;
      const color = colorOf(`c${(alone ? at : index) % 10}`);
      const dash = DASHES[alone ? 0 : (at + Math.floor(index / 10)) % DASHES.length];
      const short = plain(spec.labels[at]);
      const several = spec.names.length > 1;
      const label = alone
        ? several
          ? short
          : plain(spec.title)
        : plain(run.name) + (several ? ` · ${short}` : "");
      const few = curve.x.length <= 60;
      const trace = {
        x: place(run, curve.x),
        y: curve.y,
        name: several ? short : label,
        type: "scatter",
        mode: few ? "lines+markers" : "lines",
        marker: { size: 5, color },
        line: { color, width: 1.6, dash },
        showlegend: several && (alone || index === shown[0].index),
        hovertemplate: `%{y:.5~g}<extra>${label}</extra>`,
      };
      const smooths = steps && name.startsWith("train/") && curve.rows > 2;
      if (spec.stacked) {
        trace.x = place(run, curve.meanX ?? curve.x);
        trace.y = curve.mean ?? curve.y;
        if (smooths) trace.y = smoothed(curve.meanX ?? curve.x, trace.y, steps);
        Object.assign(trace, { stackgroup: "one", mode: "lines", fillcolor: pale(color, 0.55) });
        trace.line.width = 0.8;
      }
      if (smooths && !spec.stacked) {
        if (shown.length <= MOST_WITH_MORE)
          traces.push({
            ...trace,
            hoverinfo: "skip",
            hovertemplate: undefined,
            showlegend: false,
            line: { ...trace.line, color: pale(color, 0.28), width: 1 },
            mode: "lines",
          });
        const meanX = curve.meanX ?? curve.x;
        trace.x = place(run, meanX);
        trace.y = smoothed(meanX, curve.mean ?? curve.y, steps);
        trace.mode = "lines";
        trace.line.width = 2;
      }
      traces.push(trace);
      drawn += curve.x.length;
      rows += curve.rows;
      notFinite += curve.notFinite ?? 0;
      const ends = curve.y.filter((value) => value !== null);
      if (ends.length) lines.push(`${label}: from ${number(ends[0])} to ${number(ends.at(-1))}`);
    });
  const shapes = [];
  const marked = spec.marks && settings.marks && shown.length <= MOST_WITH_MORE;
  if (marked) addMarks(shown, place, traces, shapes, spec);
  const counts =
    drawn < rows ? `${number(drawn)} points of ${number(rows)} rows` : `${number(rows)} rows`;
  const notes = [counts];
  if (steps && traces.some((trace) => trace.line?.width === 2))
    notes.push(`smoothed over ${number(steps)} steps`);
  if (notFinite) notes.push(`${number(notFinite)} values were not finite`);
  if (spec.unit) notes.unshift(spec.unit);
  return {
    traces,
    shapes,
    shared: true,
    x: axis,
    note: notes.join(" · "),
    y: yAxis(spec),
    legend:
      spec.names.length > 1 || marked
        ? { itemclick: alone ? "toggle" : false, itemdoubleclick: false }
        : null,
    description: lines.slice(0, 8).join("; "),
  };
};

// Events where they happened on the curve of the loss; what a rollback undid, in red.
function addMarks(shown, place, traces, shapes, spec) {
  const marks = new Marks();
  for (const { run } of shown) {
    const curve = run.curves[spec.names[0]];
    if (!curve) continue;
    const values = curve.y.map((y, i) => y ?? curve.y[i - 1] ?? 0);
    for (const event of run.events) {
      const at = Math.max(event.step, curve.x[0] ?? 0);
      marks.add(run, event, place(run, [at])[0], interpolated(curve.x, values, at));
      if (event.kind !== "rollback" || !(event.from > event.step)) continue;
      const [x0, x1] = place(run, [Math.max(event.step, 1), event.from]);
      shapes.push({
        type: "rect",
        xref: "x",
        yref: "paper",
        x0,
        x1,
        y0: 0,
        y1: 1,
        layer: "below",
        fillcolor: pale(colorOf("bad"), 0.14),
        line: { width: 0 },
      });
    }
  }
  traces.push(...marks.traces());
}

// Places of events in a chart, by kind.
class Marks {
  kinds = {};

  add(run, event, x, y) {
    if (!Object.hasOwn(MARKS, event.kind)) return;
    const mark = (this.kinds[event.kind] ??= { x: [], y: [], text: [] });
    const who = data.runs.length > 1 ? `${run.name}: ` : "";
    mark.x.push(x);
    mark.y.push(y);
    mark.text.push(
      plain(`${who}${event.kind} after step ${event.step}${event.text ? `, ${event.text}` : ""}`),
    );
  }

  traces() {
    return Object.entries(this.kinds).map(([kind, mark]) => {
      const [symbol, color] = MARKS[kind];
      const open = /thin|open|line/.test(symbol);
      return {
        ...mark,
        type: "scatter",
        mode: "markers",
        name: kind,
        showlegend: true,
        marker: {
          symbol,
          size: kind === "saved" ? 9 : 11,
          color: colorOf(color),
          line: { width: open ? 1.6 : 1, color: colorOf(open ? color : "surface") },
        },
        hovertemplate: "%{text}<extra></extra>",
      };
    });
  }
}

// The median time of each phase, of several runs.
function timeOfSteps(spec, shown) {
  const names = shown.map(({ run }) => plain(run.name));
  const traces = spec.names.map((name, at) => ({
    type: "bar",
    orientation: "h",
    y: names,
    name: plain(spec.labels[at]),
    x: shown.map(({ run }) => run.curves[name]?.median ?? 0),
    marker: { color: colorOf(`c${at % 10}`) },
    hovertemplate: `%{x:.4~g} ms<extra>${plain(spec.labels[at])}</extra>`,
  }));
  return {
    traces,
    x: { title: { text: "ms, median over rows", standoff: 6 } },
    y: { autorange: "reversed", type: "category", tickfont: { size: 11 } },
    hover: "closest",
    legend: { traceorder: "normal" },
    note: "each phase's median over all rows",
  };
}

// When which step was reached: what happened between, and how long nothing did.
KINDS.progress = (spec) => {
  const traces = [],
    marks = new Marks();
  for (const { run, index } of shownRuns()) {
    const x = [],
      y = [];
    const reach = (at, step) => {
      x.push(at);
      y.push(step);
    };
    for (const event of run.events.filter((event) => event.time)) {
      const at = localTime(event.time);
      if (event.kind === "started" && x.length) reach(at, null);
      if (event.kind === "rollback" && event.from) reach(at, event.from);
      reach(at, event.step);
      marks.add(run, event, at, event.step);
    }
    traces.push({
      x,
      y,
      type: "scatter",
      mode: "lines",
      line: { color: colorOf(`c${index % 10}`), width: 1.6 },
      hoverinfo: "skip",
      showlegend: false,
    });
  }
  return {
    traces: [...traces, ...marks.traces()],
    legend: {},
    hover: "closest",
    x: { type: "date" },
    y: { title: { text: "step" }, rangemode: "tozero", tickformat: ",~r" },
    note: "a gap is the time until the next start",
    description: "See the table.",
  };
};

// Return seconds since 1970 as local time, which Plotly shows as it is.
function localTime(seconds) {
  const offset = new Date(1000 * seconds).getTimezoneOffset();
  return new Date(1000 * seconds - 60000 * offset).toISOString().slice(0, 23);
}
