"use strict";
// The page: the head with each run's state, all sections, and news from the server if there is one.

const embedded = JSON.parse(document.getElementById("data").textContent);
const byId = (name) => document.getElementById(name);
const cards = new Map();
const sections = new Map();
let runs = [];
let state = "";

// Gives what a page holds of a run's step, or what the server has of it.
function loadOf(held, path) {
  return async (run, step) => {
    if (embedded) return runs[run][held][step];
    const answer = await fetch(`${path}?run=${run}&step=${step}`);
    return answer.json();
  };
}

const rollouts = new Rollouts(byId("rollouts"), loadOf("rollouts", "/rollouts"));
const timeline = new Timeline(byId("timeline"), loadOf("timelines", "/timeline"));

function showHead() {
  byId("runs").replaceChildren(...runs.map((run, number) => {
    const line = make("div", "run");
    if (runs.length > 1) {
      line.appendChild(swatch(number));
    }
    line.appendChild(make("h1", "", run.name));
    if (run.title) line.appendChild(make("span", "faint", run.title));
    line.appendChild(make("span", `badge ${run.status}`, run.status));
    if (run.status === "waiting") return line;
    line.appendChild(make("span", "faint", `step ${run.step}${run.total_steps ? " of " + run.total_steps : ""}`));
    if (run.status === "running" && run.phase) line.appendChild(make("span", "faint", run.phase));
    return line;
  }));
  document.title = runs.map((run) => run.name).join(", ");
  const failed = runs.filter((run) => run.failure && run.status !== "running" && run.status !== "finished");
  byId("failures").replaceChildren(...failed.map((run) => {
    const box = make("div", run.status === "failed" ? "failure" : "failure quiet");
    if (runs.length > 1) box.appendChild(make("div", "label", run.name));
    box.appendChild(make("pre", "", run.failure));
    return box;
  }));
}

const opened = new Set();  // charts of a single value that somebody wants to see

function showCharts() {
  const groups = chartsOf(runs);
  const shownTitles = new Set();
  for (const [name, charts] of groups) {
    if (!sections.has(name)) {
      const section = make("section");
      const title = section.appendChild(make("h2", "", name));
      title.onclick = () => section.classList.toggle("closed");
      section.appendChild(make("div", "grid"));
      section.appendChild(make("div", "zeros faint"));
      sections.set(name, section);
    }
    const section = sections.get(name);
    byId("charts").appendChild(section);
    const [grid, zeros] = section.querySelectorAll(".grid, .zeros");
    zeros.replaceChildren();
    for (const chart of charts) {
      const key = `${name}/${chart.title}`;
      const flat = flatValue(chart, runs);
      if (flat !== undefined && !opened.has(key)) {
        const button = make("button", "", `${chart.title}: ${shown(flat)}`);
        button.title = chart.keys.join(", ");
        button.onclick = () => { opened.add(key); showCharts(); };
        zeros.append(zeros.childElementCount ? "" : "constant: ", button);
        continue;
      }
      if (!cards.has(key)) cards.set(key, new ChartCard(chart));
      const card = cards.get(key);
      grid.appendChild(card.element);
      card.update(chart, runs);
      shownTitles.add(key);
    }
    section.hidden = false;
  }
  for (const [key, card] of cards) card.element.hidden = !shownTitles.has(key);
  for (const [name, section] of sections) section.hidden = !groups.some(([other]) => other === name);
}

function table(values) {
  const element = make("table");
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined) continue;
    const row = element.appendChild(make("tr"));
    row.appendChild(make("td", "faint", name));
    row.appendChild(make("td", "", shown(value)));
  }
  return element;
}

// What differs in the configs of several runs.
function differences() {
  const having = runs.filter((run) => run.settings);
  const names = [...new Set(having.flatMap((run) => Object.keys(run.settings)))].sort();
  const isSame = (name) => new Set(having.map((run) => JSON.stringify(run.settings[name]))).size === 1;
  const rows = names.filter((name) => name !== "output" && !isSame(name));
  if (having.length < 2 || !rows.length) return [];
  const card = make("div", "card differs");
  card.appendChild(make("div", "label", "what differs in their configs"));
  const element = card.appendChild(make("table"));
  const head = element.appendChild(make("tr"));
  head.append(make("td"), ...having.map((run) => make("td", "faint", run.name)));
  for (const name of rows) {
    const row = element.appendChild(make("tr"));
    row.append(make("td", "faint", name), ...having.map((run) => make("td", "", JSON.stringify(run.settings[name] ?? null))));
  }
  return [card];
}

function showFacts() {
  const section = byId("facts");
  const title = make("h2", "", "Config and versions");
  title.onclick = () => section.classList.toggle("closed");
  section.replaceChildren(title, ...differences(), ...runs.filter((run) => run.config).map((run) => {
    const pair = make("div", "facts");
    const config = pair.appendChild(make("div", "card"));
    config.appendChild(make("div", "label", `${run.folder}/config.yaml`));
    config.appendChild(folded(run.config));
    const versions = pair.appendChild(make("div", "card"));
    versions.appendChild(make("div", "label", "versions"));
    versions.appendChild(table(run.versions));
    return pair;
  }));
}

function show(data) {
  // Maps, because every object has properties such as "constructor", and a metric may be called so.
  runs = data.runs.map((run) => ({ ...run, series: new Map(Object.entries(run.series || {})) }));
  showHead();
  showSummary(byId("summary"), runs);
  showCharts();
  timeline.update(runs);
  rollouts.update(runs);
  showSamples(byId("samples"), runs);
  showExamples(byId("examples"), runs);
  if (!byId("facts").childElementCount || !embedded) showFacts();
}

byId("smoothing").oninput = (event) => { settings.smoothing = Number(event.target.value); showCharts(); };
byId("axis").onchange = (event) => { settings.axis = event.target.value; showCharts(); };
byId("log").onchange = (event) => { settings.log = event.target.checked; showCharts(); };
byId("search").oninput = (event) => { settings.search = event.target.value; showCharts(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showCharts(); timeline.draw(); });

const SECONDS_BETWEEN = 3;

async function ask() {
  try {
    const answer = await fetch(`/data?state=${encodeURIComponent(state)}`);
    const data = await answer.json();
    if (data) {
      state = data.state;
      show(data);
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");  // the server has ended; the page stays as it is
  }
  setTimeout(ask, 1000 * SECONDS_BETWEEN);
}

if (embedded) show(embedded);
else ask();
