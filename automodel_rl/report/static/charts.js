"use strict";
// Charts: which metrics each one shows, and how plotly draws them.

// A chart names its metrics, by name or by pattern, and with `least` how many of them make it worth drawing. A metric that no chart names gets one of its own at the end.
const GROUPS = [
  ["Reward", [
    { title: "Reward", keys: ["rollout/reward_mean", "val/reward_mean"] },
    { title: "Passed", keys: [/^val\/(pass|mean|maj)@/] },
    { title: "Reward by component", keys: [/^rollout\/reward_(?!mean$|std$|errors$)/], least: 2 },
    { title: "Spread of rewards", keys: ["rollout/reward_std"] },
    { title: "Accuracy", keys: ["train/accuracy", "val/accuracy"] },
    { title: "Margin", keys: ["train/margin", "val/margin"] },
    { title: "Groups without signal", keys: ["rollout/groups_without_signal", "rollout/num_groups"] },
    { title: "Error rates of rewards", keys: [/\/error_rate_/] },
    { title: "Failed calls of rewards", keys: ["rollout/reward_errors", "rollout/left_out"] },
  ]],
  ["Loss", [
    { title: "Loss", keys: ["train/loss", "val/loss"] },
    { title: "Entropy, nats", keys: ["train/entropy"] },
    { title: "KL divergence from the reference", keys: ["train/kl_ref"] },
    { title: "Clip fractions", keys: [/^train\/clip_fraction/] },
    { title: "Ratio to the old policy", keys: [/^train\/ratio_(mean|min|max)$/] },
    { title: "Log-probability error of the generator", keys: [/^train\/logprob_error/] },
    { title: "KL divergence between generator and trainer", keys: [/^train\/(gen_kl|policy_kl|js_divergence)_error$/] },
    { title: "Probability error of the generator", keys: [/^train\/(token|max_seq)_mult_prob_error$/, "train/sampling_importance_ratio"] },
    { title: "Correction: weights, share out of bounds, effective sample size", keys: ["train/correction_weight", "train/is_oob_ratio", "train/effective_sample_size"] },
  ]],
  ["Completions", [
    { title: "Length, tokens", keys: ["rollout/completion_tokens_mean"] },
    { title: "Truncated, share", keys: ["rollout/truncated"] },
    { title: "Failed", keys: ["rollout/failed"] },
    { title: "Staleness, policy versions", keys: ["rollout/staleness_mean", "rollout/staleness_max"] },
  ]],
  ["Conversations", [
    { title: "Turns and calls of a conversation", keys: ["rollout/turns_mean", "rollout/calls_mean"] },
    { title: "Malformed, failed and late calls, share", keys: [/^rollout\/(malformed|failed|timed_out)_calls$/] },
    { title: "Ended by a limit, share", keys: ["rollout/ended_by_limit"] },
    { title: "Failed environments", keys: ["rollout/environment_errors"] },
    { title: "Time in environments, seconds", keys: ["rollout/environment_seconds_mean"] },
    { title: "Prompt tokens that were cached, share", keys: ["rollout/cached_tokens"] },
  ]],
  ["Agents", [
    { title: "Rows of an episode", keys: ["rollout/rows_mean"] },
    { title: "Forks of histories", keys: ["rollout/new_roots", "rollout/siblings"] },
    { title: "Tokens that are context again, or left out", keys: ["rollout/context_again", "rollout/left_out_tokens"] },
    { title: "Agents that failed or met a limit", keys: ["rollout/agents_not_done"] },
    { title: "Requests refused, and sent again", keys: ["rollout/refused_calls", "rollout/replays"] },
    { title: "Time of an agent, seconds", keys: ["rollout/episode_seconds_mean"] },
  ]],
  ["Optimizer", [
    { title: "Learning rate", keys: ["train/lr"] },
    { title: "Gradient norm", keys: ["train/grad_norm"] },
    { title: "Skipped steps", keys: ["train/skipped", "train/nothing_to_train"] },
  ]],
  ["Speed and memory", [
    { title: "Time of a step by phase, seconds", keys: [/^time\/(?!step_s$).*_s$/], stacked: true },
    { title: "Tokens per second", keys: ["perf/tokens_per_second"] },
    { title: "Model FLOPs utilisation", keys: ["perf/mfu"] },
    { title: "Packing efficiency", keys: ["perf/packing_efficiency"] },
    { title: "Peak memory, GiB", keys: ["memory/peak_gib"] },
    { title: "Compilation", keys: ["perf/graphs", "perf/compile_s"] },
  ]],
];
const COLORS = ["#2563eb", "#e8710a", "#0f9d76", "#c026d3", "#dc2626", "#0891b2", "#a16207", "#7c3aed", "#4d7c0f", "#be185d"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const settings = { smoothing: 0, axis: "step", log: false, search: "" };

function hasName(key, wanted) {
  return wanted instanceof RegExp ? wanted.test(key) : key === wanted;
}

// The charts that have data, as [group, [{title, keys, stacked}]].
function chartsOf(runs) {
  const all = [...new Set(runs.flatMap((run) => [...run.series.keys()]))];
  const seen = new Set(["time/step_s"]);
  const groups = GROUPS.map(([name, charts]) => [name, charts.map((chart) => {
    const keys = chart.keys.flatMap((wanted) => all.filter((key) => hasName(key, wanted)));
    keys.forEach((key) => seen.add(key));
    return { ...chart, keys };
  })]);
  groups.push(["Other", all.filter((key) => !seen.has(key)).map((key) => ({ title: key || "(a metric without a name)", keys: [key] }))]);
  const isFound = (chart) => chart.keys.length >= (chart.least || 1) &&
    (chart.title + " " + chart.keys.join(" ")).toLowerCase().includes(settings.search.toLowerCase());
  return groups.map(([name, charts]) => [name, charts.filter(isFound)]).filter(([, charts]) => charts.length);
}

// The value of a chart whose curves never have another one; undefined for others. Such a chart says no more than its title.
function flatValue(chart, runs) {
  const values = runs.flatMap((run) => chart.keys.flatMap((key) => (run.series.get(key) || [[], []])[1]));
  const isFlat = values.every((value) => value === values[0]) && (values.length > 2 || values[0] === 0);
  return isFlat ? values[0] : undefined;
}

// Exponential moving average, corrected for its start.
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return mean / mass;
  });
}

// Hours since the run's first step, for each step of a curve.
function hours(run, steps) {
  const [known, seconds] = (run.series.get("time/step_s") || [[], []]);
  const ends = [];
  known.reduce((total, step, i) => {
    const missed = i ? step - known[i - 1] : 1;  // a long run's curve has not every step
    ends.push(total + missed * seconds[i] / 3600);
    return ends[i];
  }, 0);
  let place = 0;
  return steps.map((step) => {
    while (place < known.length - 1 && known[place] < step) place += 1;
    return known.length && step >= known[0] ? ends[place] : 0;
  });
}

function traces(chart, runs) {
  const several = runs.length > 1;
  return runs.flatMap((run, number) => chart.keys.filter((key) => run.series.has(key)).flatMap((key) => {
    const place = chart.keys.indexOf(key);
    const [steps, values] = run.series.get(key);
    const x = settings.axis === "step" ? steps : hours(run, steps);
    const color = COLORS[(several ? number : place) % COLORS.length];
    // Plotly reads tags in names, and finds none in an escaped one.
    const name = escaped(clipped(several ? (chart.keys.length > 1 ? `${run.name}: ${key}` : run.name) : key));
    const common = { x, name, type: "scatter", mode: values.length < 40 ? "lines+markers" : "lines", marker: { size: 4 } };
    const hovertemplate = "%{y:.5g} <extra>%{fullData.name}</extra>";
    if (chart.stacked && !several) {
      return [{ ...common, y: values, mode: "lines", stackgroup: "one", line: { width: 0.5, color }, hovertemplate }];
    }
    const line = { color, width: 1.8, dash: several ? DASHES[place % DASHES.length] : "solid" };
    if (!settings.smoothing || values.length < 3) return [{ ...common, y: values, line, hovertemplate }];
    return [
      { ...common, y: values, mode: "lines", line: { ...line, width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip" },
      { ...common, y: smoothed(values, settings.smoothing), mode: "lines", line, hovertemplate },
    ];
  }));
}

// A text without its middle, if it is too long for a legend.
function clipped(text) {
  const letters = [...text];
  return letters.length > 48 ? letters.slice(0, 30).join("") + " … " + letters.slice(-15).join("") : text;
}

// The colour of a run, where there are several.
function swatch(number) {
  const element = make("span", "swatch");
  element.style.background = COLORS[number % COLORS.length];
  return element;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout(chart, traces, log) {
  const values = traces.flatMap((trace) => trace.y);
  const isFlat = values.every((value) => value === values[0]);  // around which plotly would show 1 above and below
  const isSmall = Math.max(...values.map(Math.abs)) < 1;  // 5e-7 rather than 500n
  const axis = { gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true, ticks: "outside",
    tickcolor: style("--line") };
  return {
    margin: { l: 8, r: 10, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--faint"), size: 11, family: "system-ui, sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text"), size: 12 } },
    xaxis: { ...axis, title: { text: settings.axis === "step" ? "step" : "hours", standoff: 4 } },
    yaxis: { ...axis, type: log ? "log" : "linear", exponentformat: isSmall ? "e" : "SI", rangemode: chart.stacked || isFlat ? "tozero" : "normal" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    showlegend: true, uirevision: "kept", dragmode: "zoom",
  };
}

// A chart's card. Its plot is drawn once the card is near the screen.
class ChartCard {
  constructor(chart) {
    this.chart = chart;
    this.log = null;
    this.element = make("div", "card");
    const head = this.element.appendChild(make("div", "head"));
    head.appendChild(make("span", "title", chart.title));
    this.logButton = head.appendChild(make("button", "", "log"));
    this.logButton.onclick = () => { this.log = !this.isLog; this.draw(); };
    const wide = head.appendChild(make("button", "", "wide"));
    wide.onclick = () => wide.classList.toggle("on", this.element.classList.toggle("wide"));
    this.plot = this.element.appendChild(make("div", "chart"));
    this.isNear = false;
    new ResizeObserver(() => { if (this.plot.data) Plotly.Plots.resize(this.plot); }).observe(this.plot);
    new IntersectionObserver((entries) => {
      this.isNear = entries[entries.length - 1].isIntersecting;
      if (this.isNear && this.isStale) this.draw();
    }, { rootMargin: "600px" }).observe(this.plot);
  }

  get isLog() { return this.log ?? settings.log; }

  update(chart, runs) {
    this.chart = chart;
    this.runs = runs;
    this.isStale = true;
    if (this.isNear) this.draw();
  }

  draw() {
    this.isStale = false;
    this.logButton.classList.toggle("on", this.isLog);
    const shown = traces(this.chart, this.runs);
    const options = { displaylogo: false, responsive: true, displayModeBar: false };
    Plotly.react(this.plot, shown, { ...layout(this.chart, shown, this.isLog), showlegend: shown.length > 1 }, options);
  }
}
