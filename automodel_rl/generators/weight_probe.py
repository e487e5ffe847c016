"""Probe of generators' weights: compares the log-probabilities of a generator with those of the trained model.

A weight sync can leave weights of a generator unchanged without any error, and rewards still rise. The probe makes
every generator continue fixed texts, and compares the log-probability that it reports for each of its tokens with the
model's. At the start of a run the probe sends modified weights, so that one that keeps its value from the checkpoint
shows at once, and not when training has moved it far.

The effect of rounding is known for most models. A larger difference is compared with the effect of noise on this
model, as rounding errors grow in deep models.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.config import RolloutRunConfig
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.policy import Policy
from automodel_rl.weight_sync.sync import sync_dtype

TEXTS = (
    "The river begins as a small spring in the hills and reaches the sea after three hundred miles.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))",
    "Q: A box holds 12 eggs. How many eggs are in 7 boxes?\nA: 12 * 7 = 84",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"]}',
)
"""Prompts of the probe. Their content is irrelevant."""

NUM_TOKENS = 32
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Root mean square over tokens of the difference of log-probabilities that rounding explains, by the coarser of the
two dtypes. vLLM with a 135M model and modified weights differs by 1e-5 in float32 and 0.08 in bfloat16; with an
unchanged head by 1.4, with unchanged queries of the last layer by 0.03 (benchmarks/rollouts.md)."""

AS_NOISE = 3.0
"""Largest ratio of a correct generator's difference to the effect of rounding-size noise on the model's own
log-probabilities (model/rounding_noise.py). Rounding in both makes 1.4; 1.6 was measured for a 70B. The bound may
exceed the effect of other weights: for 16 layers of a Qwen3-Next with random weights it is 2.3, and other weights make
1.2. The probe is then inconclusive."""

AS_OTHER_WEIGHTS = 0.5
"""Differences above this share of the effect of other weights are inconclusive."""

COARSER = 2.0
"""Factor on the tolerance for mixtures, whose routers may choose other experts, and for layers that compute in fp8."""


class WeightProbe:
    """Compares generators with the model. `say` is called at most once, if the probe is inconclusive."""

    def __init__(
        self,
        config: RolloutRunConfig,
        policy: Policy,
        fleet: Fleet,
        handle: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        say: Callable[[str], None],
    ):
        self.config, self.policy, self.fleet, self.handle, self.say = config, policy, fleet, handle, say
        self.num_tokens = min(NUM_TOKENS, config.longest_sequence // 2)
        room = config.longest_sequence - self.num_tokens
        self.prompts = [tokenizer.encode(text, add_special_tokens=False)[:room] for text in TEXTS]
        self.written: dict[int, list[Completion]] = {}  # by the generator's leading rank
        self._has_said_that_it_cannot_tell = False

    def check_changed_weights(self) -> None:
        """Sends modified weights to generators, and compares. The model's own weights must be sent next. Raises
        RolloutError as `judge` does."""
        if isinstance(self.config.rollout.generator, JoinedGeneratorConfig):
            return  # joined generators read published versions, and verify checksums
        with self.policy.with_changed_weights():
            self.fleet.sync_again()  # as policy version 0, which is not of the run
            with self.fleet.awake():
                self.ask()
            self.fleet.restore()
            self.judge()

    def ask(self) -> None:
        """Makes the generators, which must be awake, continue the texts."""
        sampling = Sampling(self.num_tokens, stop_token_ids=())
        requests = [Request(prompt, number, sampling) for number, prompt in enumerate(self.prompts)]
        written = self.fleet.write_with_each(requests)
        self.written = {rank: of for rank, of in written.items() if all(one.finish != "error" for one in of)}

    def judge(self) -> None:
        """Compares completions since the last call. The model's weights must be on the device.

        Raises:
            RolloutError: over a generator's tokens, the root mean square difference of log-probabilities is more
                than rounding explains.
        """
        written, self.written = self.written, {}
        if not written:
            return
        batch = self.rows([completion for of_writer in written.values() for completion in of_writer])
        own = self.policy.logprobs(batch)
        squares = self._squares(batch, batch["rollout_logprobs"], own).view(len(written), -1)
        of_writers = dict(zip(written, squares.mean(1).sqrt().nan_to_num(nan=torch.inf).tolist(), strict=True))
        worst = max(of_writers, key=lambda rank: of_writers[rank])
        if of_writers[worst] > self._tolerance:
            self._judge_by_noise(batch, own, worst, of_writers[worst])

    def _judge_by_noise(self, batch: Batch, own: list[Tensor], writer: int, difference: float) -> None:
        """Compares a generator's difference with the effect of rounding-size noise on the model's own
        log-probabilities, and with that of other weights."""
        coarser = max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        with self.policy.with_rounding_noise(coarser):
            of_noise = self.distance(batch, self.policy.logprobs(batch), own)
        explained = max(self._tolerance, AS_NOISE * of_noise if math.isfinite(of_noise) else 0.0)
        if difference > explained:
            raise RolloutError(
                f"the {self.fleet.name_of(writer)} does not compute with the weights that it received: "
                f"log-probabilities after fixed texts differ by {difference:.2g} from the model's (root mean square), "
                f"but rounding explains only {explained:.2g}. The run would train on samples of a different model: use "
                "another rollout.generator or version, or set weight_sync.check_every=0 to skip this check"
            )
        if self._has_said_that_it_cannot_tell:
            return
        with self.policy.with_changed_weights():
            of_others = self.distance(batch, self.policy.logprobs(batch), own)
        if not difference <= AS_OTHER_WEIGHTS * of_others:
            self._has_said_that_it_cannot_tell = True
            self.say(
                f"weight_sync.check_every cannot tell whether generators use the weights that they received: their "
                f"log-probabilities differ by {difference:.2g} from the model's (root mean square), rounding explains "
                f"{explained:.2g} in {coarser}, and different weights would make {of_others:.2g}: to be sure, try some "
                "steps in float32 or with fewer layers"
            )

    @property
    def _tolerance(self) -> float:
        is_coarser = self.handle.is_mixture or self.handle.model.fp8 is not None
        return max(TOLERANCES[dtype] for dtype in self._dtypes) * (COARSER if is_coarser else 1.0)

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of computation and of sent weights."""
        return self.handle.dtype, sync_dtype(self.config.weight_sync, self.handle)

    def rows(self, completions: Sequence[Completion]) -> Batch:
        """Returns sequences of completions, which cycle through the prompts. "rollout_logprobs" are the generators'."""
        prompts = itertools.cycle(self.prompts)
        return Batch(_sequence(next(prompts), completion) for completion in completions)

    def distance(self, batch: Batch, some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """Returns the root mean square difference of two log-probabilities of completion tokens."""
        return self._squares(batch, some, others).mean().sqrt().item()

    def _squares(self, batch: Batch, some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Returns the mean square difference of log-probabilities in each completion, [N]."""
        pairs = zip(some, others, strict=True)
        return batch.sums([(one.double() - other.double()).square() for one, other in pairs]) / self.num_tokens


def _sequence(prompt: list[int], completion: Completion) -> TokenSequence:
    before = len(prompt)
    return TokenSequence(
        torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * before + [True] * len(completion.token_ids)),
        {"rollout_logprobs": torch.tensor([0.0] * before + completion.logprobs, dtype=torch.float64)},
    )
