"use strict";

// Charts of a comparison. Its contenders are what the reader shows and hides.

// Return the contenders that are shown, each with its color.
function shownContenders() {
  return shownRuns().map(({ run, index }) => ({
    ...run,
    index,
    color: colorOf(`c${index % 10}`),
    dash: DASHES[Math.floor(index / 10) % DASHES.length],
  }));
}

function lossAxis() {
  return {
    type: settings.logy ? "log" : "linear",
    title: { text: "validation loss", standoff: 8 },
    tickformat: settings.logy ? "~r" : "~g",
    nticks: 7,
  };
}

// The final loss at each learning rate: a line through the best of the other settings.
KINDS.grid = (spec) => {
  const traces = [];
  for (const { grid, name, index, color, dash } of shownContenders()) {
    const each = grid.map((point) => ({ ...point, x: point.lr, y: point.loss }));
    const ended = each.filter((point) => point.y !== null);
    const best = [...new Set(ended.map((point) => point.x))]
      .sort((a, b) => a - b)
      .map((lr) => ended.filter((point) => point.x === lr).reduce((a, b) => (a.y <= b.y ? a : b)));
    const points = (chosen, more) => ({
      x: chosen.map((point) => point.x),
      y: chosen.map((point) => point.y),
      type: "scatter",
      name: plain(name),
      legendgroup: name,
      text: chosen.map((point) => plain(point.text)),
      hovertemplate: "%{text}<extra></extra>",
      ...more,
    });
    traces.push(
      points(best, {
        mode: "lines+markers",
        line: { color, dash, width: 2 },
        marker: { size: 7, color },
      }),
    );
    const rest = ended.filter((point) => !best.includes(point));
    if (rest.length)
      traces.push(
        points(rest, {
          mode: "markers",
          showlegend: false,
          marker: { size: 6, color: pale(color, 0.45) },
        }),
      );
    const lost = each.filter((point) => point.y === null);
    const height = 0.97 - 0.05 * (index % 6);
    if (lost.length)
      traces.push({
        ...points(lost, {
          mode: "markers",
          showlegend: false,
          marker: { symbol: "x", size: 9, color },
        }),
        y: lost.map(() => height),
        yaxis: "y2",
      });
  }
  return {
    traces,
    legend: { itemclick: false, itemdoubleclick: false },
    hover: "closest",
    y: lossAxis(),
    x: {
      type: "log",
      title: { text: "learning rate", standoff: 6 },
      tickformat: "~g",
      dtick: "D2",
    },
    y2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    note:
      "the first seed; the line joins the best of the other settings; " +
      "a cross at the top: failed or diverged",
  };
};

// The final loss by betas, in rows, and gamma, in columns: a block of rows for each contender.
// Those of a rule without gamma are as wide as all columns.
KINDS.plane = (spec) => {
  const shown = shownContenders().map((each) => ({ ...each, ...data.planes[each.name] }));
  const longest = (a, b) => (a.length < b.length ? b : a);
  const gammas = shown.map((each) => each.gammas).reduce(longest, []);
  const ticks = [];
  const traces = shown.map(({ name, betas, gammas: own, points, color }) => {
    const top = ticks.length ? ticks[ticks.length - 1].at + 1.4 : 0;
    betas.forEach((each, row) => ticks.push({ at: top + row, text: `${plain(name)} ${each}` }));
    const each = (made) => points.map((row) => row.map(made));
    return {
      type: "heatmap",
      x0: (gammas.length / own.length - 1) / 2,
      dx: gammas.length / own.length,
      y0: top,
      dy: 1,
      z: each((point) => point.shade),
      zmin: 0,
      zmax: 1,
      colorscale: [
        [0, pale(color, 0.6)],
        [1, pale(color, 0)],
      ],
      showscale: false,
      xgap: 2,
      ygap: 2,
      text: each((point) => (point.best ? `<b>${point.said}</b>` : point.said)),
      texttemplate: "%{text}",
      textfont: { color: colorOf("text") },
      customdata: each((point) => plain(point.text)),
      hovertemplate: "%{customdata}<extra></extra>",
    };
  });
  const last = ticks.length ? ticks[ticks.length - 1].at : 0;
  return {
    traces,
    hover: "closest",
    x: {
      title: { text: gammas.length > 1 ? "gamma" : "", standoff: 6 },
      tickvals: gammas.map((_, at) => at),
      ticktext: gammas,
      showgrid: false,
    },
    y: {
      range: [last + 0.6, -0.6],
      tickvals: ticks.map(({ at }) => at),
      ticktext: ticks.map(({ text }) => text),
      showgrid: false,
    },
    note:
      "the first seed; the best of the other settings; stronger is lower, bold the best of each; " +
      "a rule without gamma has one value for all; a cross: failed or diverged",
  };
};

// Validation losses of trials against what they had read, or how long they had trained.
KINDS.validation = (spec) => {
  const traces = [],
    seconds = spec.axis === "seconds";
  const shown = shownContenders();
  const longest = Math.max(
    1,
    ...shown.flatMap((each) => each.trials.flatMap((trial) => trial.seconds)),
  );
  const [, scale, unit] = UNITS.find(([from]) => longest >= from);
  for (const { trials, name, color, dash } of shown) {
    const chosen = trials.filter((trial) => spec.all || trial.best);
    chosen.forEach((trial, at) =>
      traces.push({
        x: seconds ? trial.seconds.map((each) => each / scale) : trial.tokens,
        y: trial.losses,
        type: "scatter",
        mode: trial.losses.length > 40 ? "lines" : "lines+markers",
        name: plain(name),
        legendgroup: name,
        showlegend: at === 0,
        marker: { size: 4, color },
        line: { color: trial.best ? color : pale(color, 0.4), dash, width: trial.best ? 1.8 : 1 },
        hovertemplate: `%{y:.5~g} at %{x:.4~s}<extra>${plain(trial.name)}</extra>`,
      }),
    );
  }
  const title = seconds ? `training time, ${unit}` : "tokens";
  return {
    traces,
    hover: "closest",
    legend: { itemclick: false, itemdoubleclick: false },
    y: lossAxis(),
    x: {
      type: settings.logx ? "log" : "linear",
      title: { text: title, standoff: 6 },
      tickformat: seconds ? "" : "~s",
    },
    note: spec.all
      ? "every trial; those of the best settings are stronger"
      : "the best settings of each, a line for each seed",
  };
};

// Final losses of the best settings: a dot for each seed, a bar for their mean.
KINDS.finals = (spec) => {
  const shown = shownContenders().filter((each) => each.finals.length);
  const traces = shown.flatMap(({ name, finals, mean, color }) => [
    {
      x: [mean],
      y: [plain(name)],
      type: "scatter",
      mode: "markers",
      marker: { symbol: "line-ns", size: 22, line: { color, width: 3 } },
      hovertemplate: `mean %{x:.5g}<extra>${plain(name)}</extra>`,
    },
    {
      x: finals,
      y: finals.map(() => plain(name)),
      type: "scatter",
      mode: "markers",
      marker: { size: 9, color: pale(color, 0.6), line: { color, width: 1 } },
      hovertemplate: `%{x:.5g}<extra>${plain(name)}</extra>`,
    },
  ]);
  return {
    traces,
    hover: "closest",
    x: { title: { text: "validation loss after the last step", standoff: 6 } },
    y: { autorange: "reversed", type: "category" },
    note: "a dot for each seed, a line for their mean",
  };
};

// Tokens and time that each does not need for the baseline's loss, with 95% intervals.
KINDS.saved = (spec) => {
  const traces = [],
    shown = shownContenders();
  for (const [measure, symbol, at] of [
    ["tokens", "circle", -0.12],
    ["time", "diamond-open", 0.12],
  ]) {
    const known = shown.filter((each) => each.saved[measure]);
    const mean = known.map((each) => 100 * each.saved[measure].mean);
    const end = (which, sign) =>
      known.map((each, i) =>
        each.saved[measure][which] === null
          ? 0
          : sign * (100 * each.saved[measure][which] - mean[i]),
      );
    traces.push({
      x: mean,
      y: known.map((each) => shown.indexOf(each) + at),
      name: measure,
      type: "scatter",
      mode: "markers",
      marker: { symbol, size: 9, color: known.map((each) => each.color), line: { width: 2 } },
      error_x: {
        type: "data",
        symmetric: false,
        array: end("high", 1),
        arrayminus: end("low", -1),
        color: colorOf("quiet"),
        thickness: 1.4,
        width: 5,
      },
      text: known.map((each) => plain(each.name)),
      hovertemplate: `%{x:.1f}% less ${measure}<extra>%{text}</extra>`,
    });
  }
  return {
    traces,
    legend: {},
    hover: "closest",
    note: "mean and 95% interval; to the right of 0 is better",
    x: {
      title: { text: `% less than ${plain(data.baseline)}`, standoff: 6 },
      zeroline: true,
      zerolinecolor: colorOf("quiet"),
      zerolinewidth: 1.5,
    },
    y: {
      autorange: "reversed",
      tickvals: shown.map((_, i) => i),
      ticktext: shown.map((each) => plain(each.name)),
    },
  };
};
