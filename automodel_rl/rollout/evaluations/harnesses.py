"""Commands and results of evaluation harnesses."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from automodel_rl.config.validation import InspectConfig, LmEvalConfig, ValidationConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.evaluations.endpoint import MODEL

MAX_CONCURRENT = 32
"""Most concurrent requests of a harness."""


PACKAGES = {"lm_eval": "'lm-eval[api]' transformers", "inspect": "inspect-ai openai"}
"""What pip installs for a harness, by the key of its config."""


def check_harnesses(config: ValidationConfig) -> None:
    """Raises InputError if a harness's interpreter cannot be started or lacks a package."""
    needed = {"lm_eval": ("lm_eval", "aiohttp", "transformers"), "inspect": ("inspect_ai", "openai")}
    for key, harness in (("lm_eval", config.lm_eval), ("inspect", config.inspect)):
        if harness is None:
            continue
        named = f"validation.{key}.python={harness.python}"
        script = "; ".join(f"import {module}" for module in needed[key])
        try:
            done = subprocess.run([harness.python, "-c", script], capture_output=True, text=True, check=False)
        except OSError as error:
            raise InputError(f"{named}: cannot be started ({error.strerror})") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            raise InputError(f"{named}: lacks a package ({last}): {harness.python} -m pip install {PACKAGES[key]}")


def lm_eval_command(config: LmEvalConfig, url: str, tokenizer: str, max_length: int, folder: Path) -> list[str]:
    settings = {
        "model": MODEL,
        "num_concurrent": MAX_CONCURRENT,
        "max_length": max_length,
        "max_retries": 1,
        "timeout": 3600,
    }
    if config.chat:
        kind, path = "local-chat-completions", "chat/completions"
    else:
        kind, path = "local-completions", "completions"
        settings |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    settings["base_url"] = f"{url}/{path}"
    command = [config.python, "-m", "lm_eval", "--model", kind, "--tasks", ",".join(config.tasks)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    command += ["--output_path", str(folder), *(["--apply_chat_template"] if config.chat else [])]
    return command + _options(config, include_path=config.include)


def lm_eval_results(folder: Path) -> dict[str, float]:
    """Reads the metrics of lm-eval, as `TASK/METRIC`. Raises InputError if there are none."""
    found: dict[str, float] = {}
    for task, metrics in _newest(folder, "results_*.json")["results"].items():
        for name, value in metrics.items():
            metric, _, rule = name.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and metric != "sample_len" and not metric.endswith("_stderr"):
                found[f"{task}/{metric}{'' if rule in ('', 'none') else f'_{rule}'}"] = float(value)
    return found


def inspect_command(config: InspectConfig, url: str, folder: Path) -> list[str]:
    command = [config.python, "-m", "inspect_ai", "eval", *map(_relative, config.tasks)]
    command += ["--model", f"openai-api/run/{MODEL}", "--model-base-url", url]
    command += ["--log-dir", str(folder), "--log-format", "json", "--display", "plain"]
    return [*command, "--max-connections", str(MAX_CONCURRENT), *_options(config)]


def inspect_results(folder: Path) -> dict[str, float]:
    """Reads the metrics of inspect-ai, as `TASK/SCORE_METRIC`. Raises InputError if there are none, or a task
    failed."""
    found: dict[str, float] = {}
    logs = [json.loads(file.read_text()) for file in sorted(folder.rglob("*.json"))]
    for log in (log for log in logs if "eval" in log):
        task = str(log["eval"]["task"]).rpartition("/")[2]
        if log.get("status") != "success":
            raise InputError(f"{task} ended with {log.get('status')}: {(log.get('error') or {}).get('message', '')}")
        for score in (log.get("results") or {}).get("scores", []):
            for name, metric in score["metrics"].items():
                if name != "stderr":
                    found[f"{task}/{score['name']}_{name}"] = float(metric["value"])
    if not found:
        raise InputError("it wrote no results")
    return found


def _relative(task: str) -> str:
    """Makes the path of a task relative, as inspect-ai requires."""
    return os.path.relpath(task) if os.path.isabs(task) else task


def _options(config: LmEvalConfig | InspectConfig, **more: Any) -> list[str]:
    given = {"limit": config.limit, **more, **config.options}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def _newest(folder: Path, pattern: str) -> dict[str, Any]:
    files = sorted(folder.rglob(pattern), key=lambda file: file.stat().st_mtime)
    if not files:
        raise InputError("it wrote no results")
    found: dict[str, Any] = json.loads(files[-1].read_text())
    return found
