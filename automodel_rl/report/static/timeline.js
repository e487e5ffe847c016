"use strict";
// Who works when in a step: the trainer's phases, and how many completions are written and scored at the same time.

const MAX_LANES = 24;
const WAITING = "rollout";  // the phase in which the trainer waits for completions

// The number of spans that are open, as steps of [second, number].
function openSpans(spans) {
  const changes = spans.flatMap(([start, end]) => [[start, 1], [end, -1]]).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  let open = 0;
  return changes.map(([second, change]) => [second, open += change]);
}

// Share of the time from 0 to `end` in which a lane works.
function busyShare(lane, end) {
  const spans = lane.spans.filter((_, number) => !lane.names || lane.names[number] !== WAITING);
  let busy = 0, until = 0;
  for (const [start, stop] of spans.sort((a, b) => a[0] - b[0])) {
    busy += Math.max(0, Math.min(stop, end) - Math.max(start, until));
    until = Math.max(until, Math.min(stop, end));
  }
  return end > 0 ? busy / end : 0;
}

class Timeline extends StepSection {
  constructor(section, load) {
    super(section, "Timeline of a step", "steps_with_timelines", load);
    this.note = this.bar.appendChild(make("span", "faint"));
    this.plot = section.appendChild(make("div", "card")).appendChild(make("div", "timeline"));
    new ResizeObserver(() => { if (this.plot.data) Plotly.Plots.resize(this.plot); }).observe(this.plot);
  }

  draw(lanes = this.lanes) {
    if (!lanes) return;
    this.lanes = lanes;
    const shownLanes = lanes.slice(0, MAX_LANES);
    const left = lanes.length - shownLanes.length;
    this.note.textContent = left > 0 ? `${left} further generators are left out` : "";
    const end = lanes.reduce((last, lane) => lane.spans.reduce((most, [, stop]) => Math.max(most, stop), last), 0);
    const traces = shownLanes.flatMap((lane, row) => lane.names ? this._phases(lane, row) : [this._open(lane, row)]);
    const labels = shownLanes.map((lane) => `${escaped(lane.lane)} ${Math.round(100 * busyShare(lane, end))}%`);
    const line = style("--line");
    const common = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
    this.plot.style.height = `${110 + 44 * shownLanes.length}px`;
    Plotly.react(this.plot, traces, {
      margin: { l: 8, r: 10, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--faint"), size: 11, family: "system-ui, sans-serif" }, hovermode: "closest",
      xaxis: { ...common, title: { text: "seconds after the step began", standoff: 4 } },
      yaxis: { ...common, autorange: "reversed", tickvals: shownLanes.map((_, row) => row), ticktext: labels, showgrid: false },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } }, dragmode: "zoom",
    }, { displaylogo: false, responsive: true, displayModeBar: false });
  }

  // A box for each phase of the trainer.
  _phases(lane, row) {
    const names = [...new Set(lane.names)];
    return names.map((name, place) => {
      const boxes = lane.spans.filter((_, number) => lane.names[number] === name);
      const seconds = boxes.reduce((total, [start, stop]) => total + stop - start, 0);
      return {
        x: boxes.flatMap(([start, stop]) => [start, stop, stop, start, start, null]),
        y: boxes.flatMap(() => [row - 0.4, row - 0.4, row + 0.4, row + 0.4, row - 0.4, null]),
        type: "scatter", mode: "lines", fill: "toself",
        line: { width: 0.5, color: name === WAITING ? style("--line") : COLORS[place % COLORS.length] },
        name: `${escaped(name)} ${shown(seconds)} s`, hoveron: "fills", text: `${escaped(name)}: ${shown(seconds)} s`, hoverinfo: "text",
      };
    });
  }

  // How many completions a generator writes, or rewards score, as a filled curve that is as high as its row at its peak.
  _open(lane, row) {
    const steps = openSpans(lane.spans);
    const most = steps.reduce((highest, [, open]) => Math.max(highest, open), 1);
    const height = (open) => row + 0.4 - 0.8 * open / most;
    const points = [[steps[0][0], row + 0.4], ...steps.map(([second, open]) => [second, height(open)])];
    return {
      x: points.map(([second]) => second), y: points.map(([, y]) => y), type: "scatter", mode: "lines", fill: "toself",
      line: { shape: "hv", width: 1, color: style("--faint") }, showlegend: false, hoverinfo: "text",
      text: ["0", ...steps.map(([second, open]) => `${open} at ${shown(second)} s`)],
    };
  }
}
