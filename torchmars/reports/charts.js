"use strict";

// The charts of a page: what is in view is drawn, what was changed is drawn again.

// Makes the traces and the layout of a chart, by the kind of the chart: see the other scripts.
const KINDS = {};
const byFinger = matchMedia("(pointer: coarse)").matches;
// Buttons of a chart, for touch screens too, where a drag scrolls the page, and the keys that they
// stand for. They are beside its title: Plotly's own would lie over legends.
const MOVES = [
  ["‹", "ArrowLeft", "earlier"],
  ["−", "-", "zoom out"],
  ["+", "+", "zoom in"],
  ["›", "ArrowRight", "later"],
];

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
  const image = button("SVG", "image", () => saveImage(chart));
  image.setAttribute("aria-label", "save as SVG");
  caption.append(title, ...zooms, image, size);
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
    responsive: true,
    displayModeBar: false,
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

function saveImage(chart) {
  if (chart.figure.getAttribute("aria-busy") === "true") return;
  const filename = chart.spec.title.replace(/\W+/g, "-");
  const { clientWidth: width, clientHeight: height } = chart.plot;
  Plotly.downloadImage(chart.plot, { format: "svg", filename, width, height });
}

// A zoom along x is of all charts with the same x axis; one along y is of its chart.
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
    margin: { l: 46, r: 14, t: 8, b: 36 },
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
