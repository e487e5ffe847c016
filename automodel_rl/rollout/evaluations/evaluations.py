"""Runs evaluations: starts a harness, answers its requests, and reads its results."""

import contextlib
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from automodel_rl.config.validation import InspectConfig, LmEvalConfig, ValidationConfig
from automodel_rl.errors import InputError
from automodel_rl.files import TemporaryFolder
from automodel_rl.generators.fleet import Fleet
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.evaluations.endpoint import EvaluationEndpoint, PromptRequest
from automodel_rl.rollout.evaluations.harnesses import (
    check_harnesses,
    inspect_command,
    inspect_results,
    lm_eval_command,
    lm_eval_results,
)
from automodel_rl.rollout.sampler import Sampler

LOOK_SECONDS = 0.5
"""Polling interval for the end of a harness."""

PAUSE_SECONDS = 0.05
"""Time to wait for further requests, to answer them together."""

MAX_SHOWN = 6
"""Scores of a harness on the console. All are in metrics.jsonl."""

KEY = "a key that nobody checks"


class Evaluations:
    """Evaluates the generators' current model.

    Args:
        max_length: most tokens of a prompt with its completion.
        folder: the model's folder, where harnesses find the tokenizer.
        logs: folder for the harnesses' output.

    Raises:
        InputError: a harness is not installed.
    """

    def __init__(
        self,
        config: ValidationConfig,
        policy: Policy,
        fleet: Fleet,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: set[int],
        max_length: int,
        seed: int,
        folder: str,
        logs: Path,
        say: Callable[[str], None],
    ):
        self.config, self.tokenizer, self.stop_ids, self.max_length, self.seed = (
            config,
            tokenizer,
            stop_ids,
            max_length,
            seed,
        )
        self.sampler = Sampler(policy, fleet)
        self.folder, self.logs, self.say = folder, logs, say
        check_harnesses(config)

    @property
    def are_configured(self) -> bool:
        return self.config.lm_eval is not None or self.config.inspect is not None

    def measure(self) -> dict[str, float]:
        """Returns the metrics of all tasks, under `val/`. Reports a harness that fails, and omits its metrics."""
        found: dict[str, float] = {}
        if self.config.lm_eval is not None:
            found |= self._run("lm_eval", self.config.lm_eval)
        if self.config.inspect is not None:
            found |= self._run("inspect", self.config.inspect)
        return {f"val/{name}": value for name, value in found.items()}

    def _run(self, name: str, config: LmEvalConfig | InspectConfig) -> dict[str, float]:
        began = time.monotonic()
        self.say(f"{name}: running {', '.join(config.tasks)}")
        with self._endpoint() as endpoint, TemporaryFolder() as folder:
            if isinstance(config, LmEvalConfig):
                command = lm_eval_command(config, endpoint.url, self.folder, self.max_length, Path(folder))
            else:
                command = inspect_command(config, endpoint.url, Path(folder))
            self.logs.mkdir(parents=True, exist_ok=True)
            log = self.logs / f"{name}.log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(),
                    start_new_session=True,
                )
                try:
                    is_quiet = self._answer(process, endpoint, config.quiet_minutes)
                finally:
                    with contextlib.suppress(ProcessLookupError):  # with its children
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            try:
                if is_quiet:
                    raise InputError(
                        f"it sent no request for {config.quiet_minutes:g} minutes and was stopped: if it needs longer, "
                        f"raise validation.{name}.quiet_minutes"
                    )
                if process.returncode:
                    last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                    raise InputError(f"it exited with code {process.returncode}: {last[:300]}")
                found = lm_eval_results(Path(folder)) if name == "lm_eval" else inspect_results(Path(folder))
            except InputError as error:
                self.say(f"warning: validation.{name} failed: {error}; see {log}")
                return {}
        shown = [f"{metric} {value:.3f}" for metric, value in [*found.items()][:MAX_SHOWN]]
        self.say(f"{name}: {', '.join(shown or config.tasks)}, in {time.monotonic() - began:.0f} s")
        return found

    @contextlib.contextmanager
    def _endpoint(self) -> Iterator[EvaluationEndpoint]:
        endpoint = EvaluationEndpoint(self.tokenizer, self.stop_ids, self.max_length, self.seed)
        try:
            yield endpoint
        finally:
            endpoint.close()

    def _answer(self, process: "subprocess.Popen[bytes]", endpoint: EvaluationEndpoint, quiet_minutes: float) -> bool:
        """Answers the requests of a harness until it ends. Returns True if it is quiet for too long."""
        heard = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - heard > 60 * quiet_minutes:
                return True
            with contextlib.suppress(queue.Empty):
                asked = [endpoint.asked.get(timeout=LOOK_SECONDS)]
                with contextlib.suppress(queue.Empty):
                    while True:
                        asked.append(endpoint.asked.get(timeout=PAUSE_SECONDS))
                self._sample(asked)
                heard = time.monotonic()
        return False

    def _sample(self, asked: list[PromptRequest]) -> None:
        prompts = [prompt for one in asked for prompt in one.prompts]
        try:
            answers = iter(self.sampler.answer(prompts, lambda: None))
        except BaseException as error:
            for one in asked:
                one.answers.set_exception(InputError(str(error)))
            raise
        for one in asked:
            one.answers.set_result([next(answers) for _ in one.prompts])


def _environment() -> dict[str, str]:
    local = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in ("no_proxy", "NO_PROXY")}
    return {**os.environ, **local, "OPENAI_API_KEY": KEY, "RUN_API_KEY": KEY}
