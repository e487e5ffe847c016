"""The server's page and its data."""

from functools import cache
from importlib.resources import files
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.report.page import plotly, stylesheet
from automodel_rl.serve.history import ShownSample, orders_of
from automodel_rl.serve.service import Service

MAX_CHARACTERS = 1500
"""Maximum length of a sample's text."""


@cache
def page() -> str:
    folder = files("automodel_rl.serve") / "static"
    text = (folder / "service.html").read_text()
    style = stylesheet() + (folder / "service.css").read_text()
    for name, part in {"STYLE": style, "SCRIPT": (folder / "service.js").read_text(), "PLOTLY": plotly()}.items():
        text = text.replace(f"@@{name}@@", part)
    return text


def state_of(service: Service, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Returns the data of the page. Without a tokenizer, samples are omitted."""
    history, ranks = service.history, service.ranks
    looks = [*zip(*history.snapshots, strict=True)] or [()] * 5
    return {
        "model": service.config.base_name,
        "ready": ranks.are_ready,
        "numbers": {
            "sessions": len(service.sessions),
            "samplers": len(service.samplers.table),
            "saved weights": len(service.saved),
            "saved MiB": round(service.saved.num_bytes / 2**20, 1),
            "queued jobs": ranks.num_waiting,
            "passes of several runs": ranks.num_joint,
            "tokens trained": service.throughput.total,
            "training tokens/s": round(service.throughput.per_second),
            "tokens sampled": history.num_sampled,
            "GiB on rank 0": round(ranks.peak_bytes / 2**30, 2),
        },
        "looks": dict(zip(("time", "waiting", "trained", "sampled", "memory"), map(list, looks), strict=True)),
        "runs": [_run(service, name) for name in service.runs],
        "orders": orders_of(ranks.orders),
        "samples": [] if tokenizer is None else [_shown(sample, tokenizer) for sample in reversed(history.samples)],
    }


def _shown(sample: ShownSample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    prompt, text = str(tokenizer.decode(sample.prompt)), str(tokenizer.decode(sample.tokens))
    return {
        "at": sample.at,
        "weights": sample.weights,
        "prompt": prompt[-MAX_CHARACTERS:],
        "text": text[:MAX_CHARACTERS],
    }


def _run(service: Service, name: str) -> dict[str, Any]:
    run, curve = service.runs[name], service.history.of_run(name)
    session = service.sessions.get(run.session)
    steps = [*zip(*curve.steps, strict=True)] or [(), (), ()]
    return {
        "name": name,
        "client": (session.display_name if session is not None else None) or run.session,
        "rank": run.shape.rank,
        "requests": run.next - 1,
        "waiting": len(run.waiting),
        "steps": curve.num_steps,
        "state": run.lost or "in progress",
        "used": run.used,
        "curve": {"step": list(steps[0]), "loss": list(steps[1]), "advantage": list(steps[2])},
    }
