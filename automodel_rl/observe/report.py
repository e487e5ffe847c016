"""report.html: a run's curves and sample completions, on one page that needs no other files."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_rl.files import write_complete

WIDTH, HEIGHT, MARGIN = 640, 210, 54

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 44rem; padding: 0 1rem; color: #1c2733; }
svg { width: 100%; height: auto; } text { font: 11px system-ui, sans-serif; fill: #5c6b7a; }
.sample { border-left: 3px solid #2f6fde; padding: .1rem .9rem; margin: 1rem 0; white-space: pre-wrap; }
.label { color: #5c6b7a; font-size: 12px; } table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; }
@media (prefers-color-scheme: dark) { body { background: #14191f; color: #dde5ec; } }
"""

COLORS = ("#2f6fde", "#e0792b")

CURVES = {
    "Reward": ["rollout/reward_mean", "val/reward_mean"],
    "Accuracy": ["train/accuracy", "val/accuracy"],
    "Margin": ["train/margin", "val/margin"],
    "Loss": ["train/loss", "val/loss"],
    "Completion length, tokens": ["rollout/completion_tokens_mean"],
    "Entropy, nats": ["train/entropy"],
    "KL divergence from the reference": ["train/kl_ref"],
    "Log-probability error of the generator": ["train/logprob_error"],
    "Gradient norm": ["train/grad_norm"],
    "Tokens per second": ["perf/tokens_per_second"],
}
"""The metrics that each chart shows. Charts without data are left out."""


@dataclass(frozen=True)
class Sample:
    """A prompt, the completion that the model wrote, and the one that the data has."""

    prompt: str
    completion: str
    expected: str


def write_report(path: Path, title: str, records: list[dict[str, Any]], samples: list[Sample]) -> None:
    """Writes the page.

    Args:
        path: where the page is written.
        title: the page's heading.
        records: the run's metrics, one record for each step.
        samples: completions to show.
    """
    curves = [_chart(heading, records, keys) for heading, keys in CURVES.items()]
    last = records[-1] if records else {}
    facts = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{_show(value)}</td></tr>"
        for key, value in last.items()
        if value is not None
    )
    body = [f"<h1>{html.escape(title)}</h1>", *curves]
    if samples:
        body += ["<h2>Samples</h2>", *map(_sample, samples)]
    body.append(f"<h2>Last step</h2><table>{facts}</table>")
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{''.join(body)}</html>"
    )
    write_complete(path, page)


def _sample(sample: Sample) -> str:
    parts = [("Prompt", sample.prompt), ("Model", sample.completion), ("Data", sample.expected)]
    return "".join(
        ["<div class='sample'>", *(f"<div class='label'>{n}</div>{html.escape(t)}\n" for n, t in parts), "</div>"]
    )


def _chart(title: str, records: list[dict[str, Any]], keys: list[str]) -> str:
    curves = {key: [(record["step"], record[key]) for record in records if _is_number(record.get(key))] for key in keys}
    curves = {key: points for key, points in curves.items() if points}
    if not curves:
        return ""
    steps, values = zip(*(point for points in curves.values() for point in points), strict=True)
    x_range, y_range = (min(steps), max(steps)), (min(values), max(values))

    def place(value: float, ends: tuple[float, float], size: int) -> float:
        return MARGIN + (value - ends[0]) / ((ends[1] - ends[0]) or 1) * (size - 2 * MARGIN)

    drawn = []
    for (key, points), color in zip(curves.items(), COLORS, strict=False):
        dots = [(place(x, x_range, WIDTH), HEIGHT - place(y, y_range, HEIGHT)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.6'/>")
        if len(points) < 60:
            drawn += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{color}'/>" for x, y in dots]
        drawn.append(
            f"<text x='{WIDTH - MARGIN}' y='{18 + 14 * keys.index(key)}' text-anchor='end' "
            f"style='fill:{color}'>{key} {_label(points[-1][1])}</text>"
        )
    bottom = HEIGHT - MARGIN
    axes = (
        f"<path d='M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}' fill='none' stroke='#9aa7b3'/>"
        f"<text x='{MARGIN - 6}' y='{bottom}' text-anchor='end'>{_label(y_range[0])}</text>"
        f"<text x='{MARGIN - 6}' y='{MARGIN + 4}' text-anchor='end'>{_label(y_range[1])}</text>"
        f"<text x='{MARGIN}' y='{bottom + 16}'>{x_range[0]}</text>"
        f"<text x='{WIDTH - MARGIN}' y='{bottom + 16}' text-anchor='end'>step {x_range[1]}</text>"
    )
    return f"<h2>{title}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>{axes}{''.join(drawn)}</svg>"


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _show(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else html.escape(str(value))
