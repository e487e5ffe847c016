"use strict";
// The last and the best value of what matters most, and that of the untrained model, at the top of the page.

// What to sum up, as [label, metric or pattern, which values are better].
const FIGURES = [
  ["validation reward", "val/reward_mean", "high"], ["reward", "rollout/reward_mean", "high"],
  [null, /^val\/(pass|mean|maj)@/, "high"],
  ["validation loss", "val/loss", "low"], ["loss", "train/loss", "low"],
  ["validation accuracy", "val/accuracy", "high"], ["accuracy", "train/accuracy", "high"],
  ["tokens per second", "perf/tokens_per_second", "high"], ["model FLOPs utilisation", "perf/mfu", "high"],
];

// The best value of a curve and the first step that has it.
function bestOf([steps, values], better) {
  const best = values.reduce((a, b) => ((better === "low" ? b < a : b > a) ? b : a));
  return [best, steps[values.indexOf(best)]];
}

function showSummary(section, runs) {
  const found = FIGURES.flatMap(([label, wanted, better]) =>
    [...new Set(runs.flatMap((run) => [...run.series.keys()].filter((key) => hasName(key, wanted))))]
      .map((key) => [label || key, key, better]));
  section.replaceChildren(...found.map(([label, key, better]) => {
    const tile = make("div", "card figure");
    tile.appendChild(make("div", "label", label)).title = key;
    runs.forEach((run, number) => {
      if (!run.series.has(key)) return;
      const curve = run.series.get(key);
      const [best, step] = bestOf(curve, better);
      const line = tile.appendChild(make("div", "values"));
      if (runs.length > 1) line.appendChild(swatch(number)).title = run.name;
      line.appendChild(make("span", "last", shown(curve[1].at(-1)))).title = `last, at step ${curve[0].at(-1)}`;
      const hasBest = key !== "train/loss" || run.algorithm !== "grpo";  // the loss of a policy says not how good it is
      if (hasBest) line.appendChild(make("span", "faint", `best ${shown(best)} at step ${step}`));
      if (curve[0][0] === 0) line.appendChild(make("span", "faint", `untrained ${shown(curve[1][0])}`));
    });
    return tile;
  }));
}
