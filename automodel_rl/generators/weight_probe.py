"""The probe of generators' weights: what a generator computes must be what the trained model computes, token by token.

A weight sync can leave a weight of the generator as it was without any error, and rewards still rise. The probe lets
every generator go on with fixed texts, and compares the log-probability that it reports for each of its tokens with the
model's. At the start of a run the weights that are sent are changed ones, so that a weight that stays as it was in the
checkpoint shows at once, and not when training has moved it far.

What rounding explains is known of most models. Where a difference is larger, noise tells what it explains of this one:
roundings of a deep model carry further.
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
"""What generators go on with. The texts say nothing that matters."""

NUM_TOKENS = 32
"""Number of tokens that a generator writes after each text."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Root mean square over tokens of what rounding explains of a difference of log-probabilities, by the coarser dtype of
the two. Of a 135M model with changed weights, vLLM differs by 1e-5 in float32 and by 0.08 in bfloat16. If its head
stays as it was, by 1.4, and if the queries of its last layer do, by 0.03 (benchmarks/README.md)."""

AS_NOISE = 3.0
"""A right generator differs from the model by less than so many times what noise as large as rounding makes of the
model's own log-probabilities (model/rounding_noise.py). Both of them round, which makes 1.4; 1.6 were seen of a 70B.
This may be as much as other weights make: of 16 layers of a Qwen3-Next with random weights 2.3, and other weights 1.2.
Then the probe says that it cannot tell."""

AS_OTHER_WEIGHTS = 0.5
"""A difference of more than so much of what other weights make shows nothing."""

COARSER = 2.0
"""Factor of the tolerance of mixtures, whose routers may choose other experts, and of layers that compute in fp8."""


class WeightProbe:
    """Compares generators with the model.

    Args:
        config: the run's config.
        policy: the model in training.
        fleet: its generators.
        handle: the model, for its dtype.
        tokenizer: the model's tokenizer.
        say: is told, once, that the probe cannot tell.
    """

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
        self.written: dict[int, list[Completion]] = {}  # by the rank that leads the generator
        self._has_said_that_it_cannot_tell = False

    def check_changed_weights(self) -> None:
        """Sends changed weights to generators and compares. The model's own weights must be sent next.

        Raises:
            RolloutError: a generator does not compute what the model does.
        """
        if isinstance(self.config.rollout.generator, JoinedGeneratorConfig):
            return  # such generators read versions that are published, and compare checksums
        with self.policy.with_changed_weights():
            self.fleet.sync_again()  # as policy version 0, which is none of the run's
            with self.fleet.awake():
                self.ask()
            self.fleet.restore()
            self.judge()

    def ask(self) -> None:
        """Lets generators write. They must be awake."""
        sampling = Sampling(self.num_tokens, stop_token_ids=())
        requests = [Request(prompt, number, sampling) for number, prompt in enumerate(self.prompts)]
        written = self.fleet.write_alike(requests)
        self.written = {rank: of for rank, of in written.items() if all(one.finish != "error" for one in of)}

    def judge(self) -> None:
        """Compares what generators have written since the last call. The model's weights must be on the device.

        Raises:
            RolloutError: a generator does not compute what the model does: the root mean square over its tokens of the
                difference of log-probabilities is more than rounding explains.
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
        """Compares a writer's difference with what noise as large as rounding makes of the model's own
        log-probabilities, and that with what other weights make."""
        coarser = max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        with self.policy.with_rounding_noise(coarser):
            of_noise = self.distance(batch, self.policy.logprobs(batch), own)
        explained = max(self._tolerance, AS_NOISE * of_noise if math.isfinite(of_noise) else 0.0)
        if difference > explained:
            raise RolloutError(
                f"the {self.fleet.name_of(writer)} does not compute with the weights that it got: log-probabilities of "
                f"tokens after fixed texts differ by {difference:.2g} from the model's (root mean square), and "
                f"rounding explains {explained:.2g}. The run would train with samples of another model: use another "
                "rollout.generator, or another version, or set weight_sync.check_every=0 to run without this check"
            )
        if self._has_said_that_it_cannot_tell:
            return
        with self.policy.with_changed_weights():
            of_others = self.distance(batch, self.policy.logprobs(batch), own)
        if not difference <= AS_OTHER_WEIGHTS * of_others:
            self._has_said_that_it_cannot_tell = True
            self.say(
                f"weight_sync.check_every cannot tell whether generators have the weights that they got: their "
                f"log-probabilities differ by {difference:.2g} from the model's (root mean square), rounding explains "
                f"{explained:.2g} in {coarser}, and other weights make {of_others:.2g}: to be sure, try some steps in "
                "float32 or with fewer layers"
            )

    @property
    def _tolerance(self) -> float:
        is_coarser = self.handle.is_mixture or self.handle.model.fp8 is not None
        return max(TOLERANCES[dtype] for dtype in self._dtypes) * (COARSER if is_coarser else 1.0)

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the model's computation and of what generators get."""
        return self.handle.dtype, sync_dtype(self.config.weight_sync, self.handle)

    def rows(self, completions: Sequence[Completion]) -> Batch:
        """The rows of completions, which go on with the prompts in turn. Their "rollout_logprobs" are the writers'."""
        prompts = itertools.cycle(self.prompts)
        return Batch(_sequence(next(prompts), completion) for completion in completions)

    def distance(self, batch: Batch, some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """The root mean square difference of log-probabilities of completions' tokens.

        Args:
            batch: rows of completions.
            some, others: two log-probabilities of each token of each row.
        """
        return self._squares(batch, some, others).mean().sqrt().item()

    def _squares(self, batch: Batch, some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """The mean square difference of log-probabilities in each completion, [N]."""
        pairs = zip(some, others, strict=True)
        return batch.sums([(one.double() - other.double()).square() for one, other in pairs]) / self.num_tokens


def _sequence(prompt: list[int], completion: Completion) -> TokenSequence:
    before = len(prompt)
    return TokenSequence(
        torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * before + [True] * len(completion.token_ids)),
        {"rollout_logprobs": torch.tensor([0.0] * before + completion.logprobs, dtype=torch.float64)},
    )
