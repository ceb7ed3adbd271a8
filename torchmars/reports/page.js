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
const charts = [];
const dark = matchMedia("(prefers-color-scheme: dark)");
let data;

// The page -------------------------------------------------------------------

async function start() {
  history.scrollRestoration = "manual"; // the browser would scroll before there are charts
  const scrolled = history.state?.scrolled ?? 0;
  readAddress();
  data = JSON.parse(await unpacked("data"), ownFields);
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

// While a run is running its page is rewritten; the reader's place and settings stay.
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
      for (const row of document.querySelectorAll("tr[data-kind]"))
        if (row.dataset.kind === box.dataset.kind) row.hidden = !box.checked;
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

// Small things -------------------------------------------------------------------

function make(tag, properties = {}) {
  return Object.assign(document.createElement(tag), properties);
}

function button(text, className, act) {
  const made = make("button", { type: "button", textContent: text, className });
  made.addEventListener("click", act);
  return made;
}

// Plotly reads some HTML and templates in texts: names and events are shown as they are.
function plain(text) {
  const escaped = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "%": "&#37;" };
  return String(text).replace(/[&<>%]/g, (letter) => escaped[letter]);
}

// Return an object as JSON has it, whose fields are its own: a measurement or a kind of event may
// be called as what every object has, such as "constructor".
function ownFields(name, value) {
  const isTable = value && typeof value === "object" && !Array.isArray(value);
  return isTable ? Object.assign(Object.create(null), value) : value;
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
