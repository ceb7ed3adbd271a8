"use strict";

// Draws the figures of a page with plotly, and keeps what the reader has set when it is reloaded.

const set = { x: "step", range: null, ...history.state };
const controls = document.getElementById("controls");
const plots = [...document.querySelectorAll(".plot")];
const byFinger = matchMedia("(pointer: coarse)").matches;
let data;

// Seen on white and on black. On the page texts have the color of its other texts: see page.css.
const GRAY = "#808080", FAINT = "rgba(128, 128, 128, 0.2)", NONE = "rgba(0, 0, 0, 0)";
const LINES = { gridcolor: FAINT, linecolor: GRAY, zeroline: false, zerolinecolor: GRAY };
const AXIS = { ...LINES, automargin: true, spikecolor: GRAY, spikethickness: 1 };
const LAYOUT = {
  margin: { l: 46, r: 12, t: 28, b: 36 },
  paper_bgcolor: NONE,
  plot_bgcolor: NONE,
  font: { size: 12, color: GRAY },
  modebar: { color: GRAY, activecolor: "#3178d0", bgcolor: NONE },
  legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
  yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  hovermode: "closest",
  barmode: "stack",
  dragmode: byFinger ? false : "zoom", // a finger scrolls the page
};
const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: byFinger || "hover",
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  toImageButtonOptions: { format: "svg" },
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MARKS = {
  started: ["triangle-right", "#26934a"],
  saved: ["line-ns-open", GRAY],
  spike: ["x-thin-open", "#b87000"],
  rollback: ["triangle-left", "#d64550"],
  stopped: ["square", GRAY],
  complete: ["star", "#26934a"],
  failed: ["x", "#d64550"],
};
// These styles would be in the way where more runs are shown.
const MORE = ["pale", "mark", "undone"], MOST_WITH_MORE = 6;
const QUIET = { showlegend: false, hoverinfo: "skip" };
// What plotly draws of a trace with a style, in a color.
const STYLES = {
  line: ({ x, y, hover, dash, text }, color) => ({
    mode: x.length > 60 ? "lines" : "lines+markers",
    line: { color, dash: DASHES[(dash ?? 0) % DASHES.length], width: 2 },
    marker: { color, size: text ? 8 : 4 },
    ...(text ? { hoverinfo: "text" } : { hovertemplate: `%{y:.5~g}<extra>${hover}</extra>` }),
  }),
  pale: (_, color) => ({ mode: "lines", line: { color, width: 1 }, opacity: 0.35, ...QUIET }),
  faint: (trace, color) => ({ ...STYLES.line(trace, color), opacity: 0.4 }),
  path: (_, color) => ({ mode: "lines", line: { color }, ...QUIET }),
  area: (trace, color) => ({ ...STYLES.line(trace, color), mode: "lines", stackgroup: "one" }),
  bar: (_, color) => ({ type: "bar", orientation: "h", marker: { color }, hoverinfo: "x+name" }),
  undone: () => ({
    yaxis: "y2", fill: "toself", fillcolor: "rgba(214, 69, 80, 0.15)", mode: "none", ...QUIET,
  }),
  mark: ({ kind }) => {
    const [symbol, color] = Object.hasOwn(MARKS, kind) ? MARKS[kind] : ["circle-open", GRAY];
    return { mode: "markers", marker: { symbol, color, size: 10 }, hoverinfo: "text" };
  },
  dots: ({ text }, color) => ({
    mode: "markers", marker: { color, size: 8 }, opacity: 0.5, hoverinfo: text ? "text" : "x",
  }),
  lost: (_, color) => ({ ...STYLES.dots({ text: 1 }, color), ...marker("x", color), yaxis: "y2" }),
  mean: (_, color) => ({ hoverinfo: "x", ...marker("line-ns-open", color, 22) }),
  tokens: ({ x: [x], ends }, color) => ({
    ...marker("circle", color),
    hoverinfo: "x+name",
    error_x: { symmetric: false, array: [ends[1] - x], arrayminus: [x - ends[0]], color: GRAY },
  }),
  time: (trace, color) => ({ ...STYLES.tokens(trace, color), ...marker("diamond-open", color) }),
  plane: ({ text, best }, color) => ({
    text: text.map((row, i) => row.map((each, j) => (best[i][j] ? `<b>${each}</b>` : each))),
    type: "heatmap", zmin: 0, zmax: 1, colorscale: [[0, FAINT], [1, color]], opacity: 0.7,
    xgap: 2, ygap: 2, showscale: false, texttemplate: "%{text}", hoverinfo: "text",
  }),
};

function marker(symbol, color, size = 9) {
  return { mode: "markers", marker: { symbol, color, size }, opacity: 1 };
}

async function start() {
  for (const control of controls.elements) bind(control);
  document.getElementById("all")?.addEventListener("input", showAllOrNone);
  for (const details of document.querySelectorAll("details")) {
    const name = `open ${details.firstElementChild.textContent}`;
    details.open = set[name] ?? details.open;
    details.addEventListener("toggle", () => keep(name, details.open));
  }
  addEventListener("hashchange", () => history.replaceState(set, "")); // an entry of its own
  renewNow();
  data = JSON.parse(await unpacked("data"), plain);
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  const drawSeen = (entries) => entries.forEach((e) => e.isIntersecting && draw(e.target));
  const seen = new IntersectionObserver(drawSeen, { rootMargin: "200px" });
  plots.forEach((plot, at) => {
    plot.figure = data.figures[at];
    seen.observe(plot);
  });
  addEventListener("beforeprint", () => plots.forEach(draw));
}

// Return the text of a script element, which is gzipped and in base64.
async function unpacked(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// Plotly reads HTML, templates and formulas in texts: names and events are shown as they are.
function plain(_, value) {
  const escaped = (letter) => `&#${letter.codePointAt(0)};`;
  return typeof value === "string" ? value.replace(/[&<>%$]/g, escaped) : value;
}

// While a run is running its page is rewritten; the reader's place and settings stay.
function renewNow() {
  const box = controls.elements.renew;
  const isBusy = () => document.hidden || document.querySelector(".plot:hover, select:focus");
  if (box)
    setInterval(() => box.checked && !isBusy() && location.reload(), 1000 * box.dataset.every);
}

function bind(control) {
  const value = control.type === "checkbox" ? "checked" : "value";
  control[value] = set[control.name] ?? control[value];
  control.addEventListener("input", () => {
    if (["x", "logx"].includes(control.name)) set.range = null;
    keep(control.name, control[value]);
    redraw();
  });
}

function showAllOrNone({ target }) {
  for (const box of controls.elements)
    if (box.name.startsWith("run-")) keep(box.name, (box.checked = target.checked));
  redraw();
}

function keep(name, value) {
  set[name] = value;
  history.replaceState(set, "");
}

function redraw() {
  for (const plot of plots) {
    plot.drawn = false;
    const { top, bottom } = plot.getBoundingClientRect();
    if (bottom > -200 && top < innerHeight + 200) draw(plot);
  }
}

function draw(plot) {
  if (plot.drawn || !plot.clientWidth) return;
  const { traces, by_steps } = plot.figure, groups = new Set();
  const all = traces.filter(({ run }) => set[`run-${run}`] !== false);
  const many = by_steps && new Set(all.map(({ run }) => run)).size > MOST_WITH_MORE;
  const shown = all.filter(({ style }) => !many || !MORE.includes(style)).map((trace) => {
    const { style, color, group, run, x } = trace;
    const made = {
      ...trace,
      type: "scatter",
      showlegend: !groups.has(group),
      legendgroup: `${group}`,
      ...STYLES[style](trace, data.colors[color % data.colors.length]),
    };
    if (by_steps) made.x = along(run, x);
    if ((group ?? null) === null) made.showlegend = false;
    if (made.showlegend) groups.add(group);
    return made;
  });
  const xaxis = axisOf("x", plot.figure), yaxis = axisOf("y", plot.figure);
  if (by_steps) xaxis.title = { text: data.axes.titles[set.x] };
  if (by_steps && set.range) xaxis.range = set.range;
  const hovermode = by_steps && traces.length <= 16 ? "x unified" : "closest";
  const layout = { ...LAYOUT, hovermode, xaxis, yaxis, showlegend: groups.size > 1 };
  Plotly.react(plot, shown, layout, CONFIG);
  plot.drawn = true;
  if (!by_steps) return;
  plot.removeAllListeners("plotly_relayout");
  plot.on("plotly_relayout", zoomed);
}

function axisOf(name, { [name]: { log, title, ...special } }) {
  const axis = { ...AXIS, title: { text: title ?? "" }, ...special };
  return set[`log${name}`] && log ? { ...axis, type: "log" } : axis;
}

// A zoom along x is of all figures with the same x axis.
function zoomed(event) {
  const ends = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  const range = event["xaxis.autorange"] ? null : ends;
  if ((range && range[0] === undefined) || String(range) === String(set.range)) return;
  keep("range", range);
  for (const plot of plots)
    if (plot.drawn && plot.figure.by_steps)
      Plotly.relayout(plot, range ? { "xaxis.range": range } : { "xaxis.autorange": true });
}

// Return where steps of a run are on the x axis, which is linear between those that are known.
function along(run, steps) {
  const { step: known, [set.x]: values } = data.axes.runs[run];
  let at = 1;
  return steps.map((step) => {
    if (step < known[at - 1]) at = 1;
    while (at < known.length - 1 && known[at] < step) at++;
    const share = (step - known[at - 1]) / (known[at] - known[at - 1]);
    return values[at - 1] + share * (values[at] - values[at - 1]);
  });
}

start();
