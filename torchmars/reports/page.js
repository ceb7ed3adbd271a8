"use strict";

// What the reader has set. It is kept in the page's address, so that a reload keeps it.
const DEFAULTS = {
  x: "step",
  logx: false,
  logy: false,
  smooth: 0,
  marks: true,
  renew: true,
  theme: "auto",
};
const settings = { ...DEFAULTS, hidden: new Set(), range: null, open: null };
// Makes the traces and the layout of a chart, by the kind of the chart: see the other scripts.
const KINDS = {};
const charts = [];
const dark = matchMedia("(prefers-color-scheme: dark)");
const byFinger = matchMedia("(pointer: coarse)").matches;
// Buttons of a chart on a touch screen, where a drag scrolls the page, and the keys they stand for.
const MOVES = [
  ["‹", "ArrowLeft", "earlier"],
  ["−", "-", "zoom out"],
  ["+", "+", "zoom in"],
  ["›", "ArrowRight", "later"],
];
let data;

// The page -------------------------------------------------------------------

async function start() {
  history.scrollRestoration = "manual"; // the browser would scroll before there are charts
  const scrolled = history.state?.scrolled ?? 0;
  readAddress();
  data = JSON.parse(await unpacked("data"));
  settings.smooth ??= data.smooth;
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  fillControls();
  for (const place of document.querySelectorAll("[data-charts]"))
    for (const chart of data[place.dataset.charts] ?? []) addChart(place, chart);
  scrollTo(0, scrolled);
  let resting;
  addEventListener(
    "scroll",
    () => {
      clearTimeout(resting);
      resting = setTimeout(writeAddress, 200);
    },
    { passive: true },
  );
  addEventListener("hashchange", () => setTimeout(writeAddress));
  dark.addEventListener("change", applyTheme);
  renewNow();
}

// Return the text of a script element, which is gzipped and in base64.
async function unpacked(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function readAddress() {
  const given = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  settings.smooth = given.has("smooth") ? Number(given.get("smooth")) || 0 : null;
  for (const name of ["logx", "logy", "marks", "renew"])
    if (given.has(name)) settings[name] = given.get(name) === "1";
  for (const name of ["x", "theme"]) if (given.has(name)) settings[name] = given.get(name);
  if (given.has("hide")) settings.hidden = new Set(given.get("hide").split(",").map(Number));
  if (given.has("range")) settings.range = given.get("range").split(",").map(Number);
  if (given.has("open")) settings.open = new Set(given.get("open").split(","));
}

function writeAddress() {
  const given = new URLSearchParams();
  for (const [name, usual] of Object.entries({ ...DEFAULTS, smooth: data.smooth })) {
    const value = settings[name];
    if (value !== usual) given.set(name, typeof value === "boolean" ? Number(value) : value);
  }
  if (settings.hidden.size)
    given.set(
      "hide",
      [...settings.hidden].sort((a, b) => a - b),
    );
  if (settings.range) given.set("range", settings.range);
  if (settings.open) given.set("open", [...settings.open]);
  history.replaceState({ scrolled: scrollY }, "", "#" + given);
}

// The page of a run that goes on is written anew; the reader's place and settings stay.
function renewNow() {
  const box = document.querySelector("[name=renew]");
  if (!box) return;
  setInterval(
    () => {
      const busy = document.hidden || document.querySelector(".plot:hover, #controls:focus-within");
      if (settings.renew && !busy) location.reload();
    },
    1000 * Number(box.dataset.every),
  );
}

// Controls ---------------------------------------------------------------------

function fillControls() {
  const form = document.getElementById("controls");
  for (const control of form.elements) {
    const { name, type } = control;
    if (!(name in DEFAULTS)) continue;
    if (type === "checkbox") control.checked = settings[name];
    else control.value = settings[name];
    control.addEventListener("input", () => {
      settings[name] =
        type === "checkbox"
          ? control.checked
          : type === "range"
            ? Number(control.value)
            : control.value;
      if (name === "x" || name === "logx") forgetZoom();
      if (name === "theme") applyTheme();
      else changed();
    });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.reset.addEventListener("click", () => {
    forgetZoom();
    changed();
  });
  for (const box of document.querySelectorAll("[data-run]")) {
    const run = Number(box.dataset.run);
    box.parentElement.querySelector(".swatch").style.background = `var(--c${run % 10})`;
    box.checked = !settings.hidden.has(run);
    box.addEventListener("input", () => {
      settings.hidden[box.checked ? "delete" : "add"](run);
      changed();
    });
  }
  for (const button of document.querySelectorAll("[data-show]"))
    button.addEventListener("click", () => {
      const all = data.runs.map((_, run) => run);
      settings.hidden = new Set(button.dataset.show === "all" ? [] : all);
      for (const box of document.querySelectorAll("[data-run]"))
        box.checked = button.dataset.show === "all";
      changed();
    });
  for (const box of document.querySelectorAll("input[data-kind]"))
    box.addEventListener("input", () => {
      for (const row of document.querySelectorAll(`tr[data-kind="${box.dataset.kind}"]`))
        row.hidden = !box.checked;
    });
  for (const each of document.querySelectorAll("details[id]")) {
    if (settings.open) each.open = settings.open.has(each.id);
    each.addEventListener("toggle", () => {
      settings.open = new Set([...document.querySelectorAll("details[id][open]")].map((d) => d.id));
      writeAddress();
    });
  }
  applyTheme();
}

function applyTheme() {
  const isDark = settings.theme === "auto" ? dark.matches : settings.theme === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  changed();
}

function changed() {
  const steps = smoothingWindow();
  const output = document.querySelector("output[name=window]");
  if (output) output.value = steps ? `${number(steps)} steps` : "off";
  document.getElementById("controls").elements.reset.hidden =
    !settings.range && !charts.some((c) => c.yRange);
  for (const chart of charts) chart.stale = true;
  drawVisible();
  writeAddress();
}

function forgetZoom() {
  settings.range = null;
  for (const chart of charts) chart.yRange = null;
}

// Charts -----------------------------------------------------------------------

const inView = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = charts.find((each) => each.figure === entry.target);
      chart.visible = entry.isIntersecting;
    }
    drawVisible();
  },
  { rootMargin: "150px" },
);

function addChart(place, spec) {
  const figure = make("figure", { className: spec.large ? "large" : "", tabIndex: 0 });
  const caption = make("figcaption");
  const title = make("h3", { textContent: spec.title });
  const size = button(spec.large ? "smaller" : "larger", "size", () => {
    size.textContent = figure.classList.toggle("large") ? "smaller" : "larger";
    Plotly.Plots.resize(plot);
  });
  const zooms = MOVES.map(([sign, key, words]) => {
    const each = button(sign, "zoom", () => moveBy(chart, key));
    each.setAttribute("aria-label", words);
    return each;
  });
  caption.append(title, ...zooms, size);
  const plot = make("div", { className: "plot" });
  const note = make("p", { className: "note quiet" });
  figure.append(caption, plot, note);
  figure.setAttribute("aria-busy", "true");
  place.append(figure);
  const chart = { spec, figure, plot, note, stale: true, visible: false, yRange: null };
  charts.push(chart);
  figure.addEventListener("keydown", (event) => byKey(chart, event));
  inView.observe(figure);
}

function drawVisible() {
  for (const chart of charts) if (chart.visible && chart.stale) draw(chart);
}

function draw(chart) {
  chart.stale = false;
  const made = KINDS[chart.spec.kind](chart.spec);
  const layout = baseLayout(made, chart);
  Plotly.react(chart.plot, made.traces, layout, {
    displaylogo: false,
    responsive: true,
    displayModeBar: byFinger ? false : "hover",
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d"]],
    toImageButtonOptions: { format: "svg", filename: chart.spec.title.replace(/\W+/g, "-") },
  });
  chart.note.textContent = made.note ?? "";
  chart.plot.setAttribute("role", "img");
  chart.plot.setAttribute("aria-label", `${chart.spec.title}. ${made.description ?? ""}`);
  chart.figure.setAttribute("aria-busy", "false");
  if (chart.listens) return;
  chart.listens = true;
  chart.plot.on("plotly_relayout", (event) => zoomed(chart, event));
  chart.plot.on("plotly_doubleclick", () => {
    if (!chart.shared) return true;
    forgetZoom();
    changed();
    return false;
  });
}

// A zoom along x is that of all charts with the same x axis; one along y is of its chart.
function zoomed(chart, event) {
  if (!chart.shared) return;
  const x = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  const y = [event["yaxis.range[0]"], event["yaxis.range[1]"]];
  if (event["xaxis.autorange"] || event["yaxis.autorange"]) forgetZoom();
  else {
    if (y[0] !== undefined) chart.yRange = y;
    if (x[0] !== undefined) settings.range = x.map(Number);
    if (x[0] === undefined && y[0] === undefined) return;
  }
  changed();
}

function byKey(chart, event) {
  if (event.target !== chart.figure || event.ctrlKey || event.metaKey || event.altKey) return;
  if (moveBy(chart, event.key)) event.preventDefault();
}

// Zoom or move along x as a key says. Return whether it says so.
function moveBy(chart, key) {
  const range = chart.plot.layout?.xaxis?.range;
  if (typeof range?.[0] !== "number") return false;
  const [low, high] = range,
    width = high - low;
  const moves = {
    "+": [low + width / 4, high - width / 4],
    "-": [low - width / 2, high + width / 2],
    ArrowLeft: [low - width / 5, high - width / 5],
    ArrowRight: [low + width / 5, high + width / 5],
  };
  moves["="] = moves["+"];
  if (key !== "0" && !(key in moves)) return false;
  if (chart.shared) {
    if (key === "0") forgetZoom();
    else settings.range = moves[key];
    changed();
  } else {
    const change = key === "0" ? { "xaxis.autorange": true } : { "xaxis.range": moves[key] };
    Plotly.relayout(chart.plot, change);
  }
  return true;
}

function baseLayout(made, chart) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const line = {
    gridcolor: color("grid"),
    linecolor: color("line"),
    zeroline: false,
    automargin: true,
    ticks: "outside",
    ticklen: 4,
    tickcolor: color("line"),
  };
  const spike = { spikecolor: color("quiet"), spikethickness: 1, spikedash: "solid" };
  const x = { ...line, ...(!made.hover && spike), ...made.x },
    y = { ...line, ...made.y };
  chart.shared = Boolean(made.shared);
  if (chart.shared && settings.range) {
    x.range = settings.range;
    y.range = chart.yRange ?? rangeWithin(made, settings.range);
  }
  x.autorange = !x.range;
  y.autorange = y.range ? false : (y.autorange ?? true);
  const many = made.traces.length > 16;
  return {
    margin: { l: 46, r: 14, t: made.legend ? 8 : 22, b: 36 },
    paper_bgcolor: color("surface"),
    plot_bgcolor: color("surface"),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("quiet") },
    colorway: [...Array(10).keys()].map((n) => color(`c${n}`)),
    xaxis: x,
    yaxis: y,
    ...(made.y2 && { yaxis2: made.y2 }),
    shapes: made.shapes ?? [],
    showlegend: Boolean(made.legend),
    legend: {
      orientation: "h",
      y: 1.02,
      yanchor: "bottom",
      x: 0,
      itemclick: "toggle",
      ...made.legend,
    },
    hovermode: made.hover ?? (many ? "closest" : "x unified"),
    hoverlabel: {
      bgcolor: color("surface"),
      bordercolor: color("line"),
      font: { color: color("text"), size: 12 },
      namelength: 40,
    },
    dragmode: byFinger ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("quiet"), activecolor: color("accent") },
    barmode: "stack",
    bargap: 0.35,
    uirevision: false,
  };
}

// Return the y range of what lies within an x range, both as Plotly has them on a log axis.
function rangeWithin(made, [low, high]) {
  const xLog = made.x.type === "log",
    yLog = made.y.type === "log";
  let least = Infinity,
    most = -Infinity;
  for (const { x, y, stackgroup, yaxis } of made.traces) {
    if (stackgroup) return undefined;
    for (let i = 0; i < x.length; i++) {
      const at = xLog ? Math.log10(x[i]) : x[i];
      if (y[i] === null || at < low || at > high || (yLog && y[i] <= 0)) continue;
      const value = yLog ? Math.log10(y[i]) : y[i];
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  }
  if (least > most) return undefined;
  const space = (most - least || Math.abs(most) || 1) * 0.05;
  return [least - space, most + space];
}

// Small things -------------------------------------------------------------------

function make(tag, properties = {}) {
  return Object.assign(document.createElement(tag), properties);
}

function button(text, className, act) {
  const made = make("button", { type: "button", textContent: text, className });
  made.addEventListener("click", act);
  return made;
}

// Plotly reads some HTML in texts: names and samples are shown as they are.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function number(value) {
  return Number(value.toPrecision(value >= 1000 ? 4 : 3)).toLocaleString("en-US", {
    maximumSignificantDigits: 6,
  });
}

function colorOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function pale(color, opacity) {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgba(${parts}, ${opacity})`;
}

// Return the value at `at` of the line through (xs, ys), both in order.
function interpolated(xs, ys, at) {
  if (!xs.length || at <= xs[0]) return ys[0] ?? 0;
  let low = 0,
    high = xs.length - 1;
  if (at >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= at) low = middle;
    else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (at - xs[low])) / (xs[high] - xs[low]);
}
