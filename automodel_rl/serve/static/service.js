"use strict";
// The page of a service: it asks the server every few seconds, and stays as it is when the server has ended.

const KEY = new URLSearchParams(location.search).get("key") || "";
const SECONDS_BETWEEN = 3;
const COLORS = ["#2563eb", "#e8710a", "#0f9d76", "#c026d3", "#dc2626", "#0891b2", "#a16207", "#7c3aed"];
const byId = (name) => document.getElementById(name);

function make(kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// A chart in a card, which is made once.
const charts = new Map();
function chart(where, title, traces, isTime) {
  if (!charts.has(title)) {
    const card = make("div", "card");
    card.appendChild(make("div", "head")).appendChild(make("span", "title", title));
    charts.set(title, card.appendChild(make("div", "chart")));
    byId(where).appendChild(card);
  }
  const plot = charts.get(title);
  plot.parentElement.hidden = !traces.length;
  if (!traces.length) return;
  const axis = { gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true };
  Plotly.react(plot, traces, {
    margin: { l: 8, r: 10, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text"), size: 12 } },
    font: { color: style("--faint"), size: 11, family: "system-ui, sans-serif" }, uirevision: "kept",
    xaxis: { ...axis, type: isTime ? "date" : "linear", title: { text: isTime ? "" : "optimizer step" } },
    yaxis: { ...axis, rangemode: "tozero" }, showlegend: traces.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
  }, { displaylogo: false, responsive: true, displayModeBar: false });
}

function line(x, y, name, number) {
  const mode = x.length < 40 ? "lines+markers" : "lines";
  return { x, y, name, type: "scatter", mode, marker: { size: 4 }, line: { color: COLORS[number % COLORS.length], width: 1.8 } };
}

function table(element, heads, rows, empty) {
  const head = make("tr");
  heads.forEach((text) => head.appendChild(make("th", "", text)));
  element.replaceChildren(...(rows.length ? [head] : [make("caption", "faint", empty)]), ...rows.map((cells) => {
    const row = make("tr");
    cells.forEach((cell) => row.appendChild(make("td", "", String(cell))));
    return row;
  }));
}

function ago(seconds) {
  const since = Math.max(0, Date.now() / 1000 - seconds);
  return since < 90 ? `${Math.round(since)} s ago` : `${Math.round(since / 60)} min ago`;
}

function show(data) {
  byId("model").textContent = data.model;
  byId("state").textContent = data.ready ? "running" : "the ranks are being started";
  byId("state").className = `badge ${data.ready ? "running" : "waiting"}`;
  byId("numbers").replaceChildren(...Object.entries(data.numbers).map(([name, value]) => {
    const card = make("div", "card");
    card.append(make("div", "label", name), make("div", "value", value.toLocaleString("en")));
    return card;
  }));
  const times = data.looks.time.map((time) => new Date(time * 1000));
  const over = (names) => (times.length ? names.map(([key, name], number) => line(times, data.looks[key], name, number)) : []);
  chart("looks", "Tokens/s", over([["trained", "trained"], ["sampled", "sampled"]]), true);
  chart("looks", "Queued jobs", over([["waiting", "jobs"]]), true);
  chart("looks", "Memory of rank 0, GiB", over([["memory", "GiB"]]), true);
  const curves = (key) => data.runs.map((run, number) => [run, number]).filter(([run]) => run.curve[key].some((value) => value !== null))
    .map(([run, number]) => line(run.curve.step, run.curve[key], run.name, number));
  chart("curves", "Loss per token", curves("loss"), false);
  chart("curves", "Mean advantage", curves("advantage"), false);
  table(byId("runs"), ["run", "client", "rank", "requests", "steps", "waiting", "last used", "state"],
    data.runs.map((run) => [run.name, run.client, run.rank || "all weights", run.requests, run.steps, run.waiting, ago(run.used), run.state]),
    "no run");
  table(byId("orders"), ["", "job", "of", "seconds"],
    data.orders.map((order) => [order.runs ? "runs" : "waits", order.job, order.run, order.seconds]), "nothing runs or waits");
  byId("samples").replaceChildren(...(data.samples.length ? data.samples : [null]).map((sample) => {
    if (sample === null) return make("p", "faint", "nothing was sampled yet");
    const card = make("div", "card sample");
    card.append(make("div", "label", `${ago(sample.at)}, ${sample.weights}`), make("pre", "prompt", sample.prompt), make("pre", "", sample.text));
    return card;
  }));
}

async function ask() {
  try {
    const answer = await fetch(`/state?key=${encodeURIComponent(KEY)}`);
    if (answer.ok) show(await answer.json());
    document.body.classList.toggle("lost", !answer.ok);
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(ask, 1000 * SECONDS_BETWEEN);
}

ask();
