"""The probe of generators' weights: what a generator computes must be what the trained model computes, token by token.

A weight sync can leave a weight of the generator as it was without any error, and rewards still rise. The probe lets
every generator go on with fixed texts, and compares the log-probability that it reports for each of its tokens with the
model's. At the start of a run the weights that are sent are changed ones, so that a weight that stays as it was in the
checkpoint shows at once, and not when training has moved it far.
"""

import dataclasses

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Microbatch, TokenSequence
from automodel_rl.config import RolloutRunConfig
from automodel_rl.data.loader import pack_step, sums_of_sequences
from automodel_rl.engine import Engine
from automodel_rl.errors import RolloutError, innermost
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.model.changed_weights import changed_weights
from automodel_rl.parallel.host_collectives import gather_objects
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

COARSER = 2.0
"""Factor of the tolerance of mixtures, whose routers may choose other experts, and of layers that compute in fp8."""


class WeightProbe:
    """Compares generators with the model. Every method is a collective of all ranks.

    Args:
        config: the run's config.
        engine: trains the model.
        supervisor: the supervisor of this rank's generator.
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self,
        config: RolloutRunConfig,
        engine: Engine,
        supervisor: GeneratorSupervisor,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.config, self.engine, self.supervisor = config, engine, supervisor
        self.num_tokens = min(NUM_TOKENS, config.longest_sequence // 2)
        room = config.longest_sequence - self.num_tokens
        self.prompts = [tokenizer.encode(text, add_special_tokens=False)[:room] for text in TEXTS]
        self.written: dict[int, list[Completion]] = {}  # by the rank whose generator wrote them

    def check_changed_weights(self) -> None:
        """Sends changed weights to generators and compares. The model's own weights must be sent next.

        Raises:
            RolloutError: a generator does not compute what the model does.
        """
        with changed_weights(self.engine.handle):
            self.supervisor.load_weights_again()  # as policy version 0, which is none of the run's
            with self.supervisor.awake():
                self.ask()
            self.supervisor.offload.restore()
            self.judge()

    def ask(self) -> None:
        """Lets generators write. They must be awake."""
        own: list[Completion] = []
        generator = self.supervisor.generator
        if self.supervisor.ranks.leads and generator is not None and not self.supervisor.problem:
            sampling = Sampling(self.num_tokens, stop_token_ids=())
            requests = [Request(prompt, number, sampling) for number, prompt in enumerate(self.prompts)]
            try:
                own = generator.submit(requests)()
            except Exception as problem:  # the next rollout starts it again
                self.supervisor.problem = self.supervisor.problem or innermost(problem)
        is_whole = all(completion.finish != "error" for completion in own)
        own = [dataclasses.replace(completion, routes=None) for completion in own if is_whole]  # they are large
        everything = gather_objects(own, self.supervisor.world)
        self.written = {rank: completions for rank, completions in enumerate(everything) if completions}

    def judge(self) -> None:
        """Compares what generators have written since the last call. The model's weights must be on the device.

        Raises:
            RolloutError: a generator does not compute what the model does: the root mean square over its tokens of the
                difference of log-probabilities is more than rounding explains.
        """
        written, self.written = self.written, {}
        if not written:
            return
        squares = self.squares([c for completions in written.values() for c in completions])
        means = squares.view(len(written), -1).mean(1).sqrt().nan_to_num(nan=torch.inf).tolist()
        of_writers = dict(zip(written, means, strict=True))
        worst = max(of_writers, key=lambda rank: of_writers[rank])
        tolerance = self._tolerance
        if of_writers[worst] > tolerance:
            raise RolloutError(
                f"the generator of rank {worst} does not compute with the weights that it got: log-probabilities of "
                f"tokens after fixed texts differ by {of_writers[worst]:.2g} from the model's (root mean square), and "
                f"rounding explains {tolerance:g}. The run would train with samples of another model: use another "
                "rollout.generator, or another version, or set weight_sync.check_every=0 to run without this check"
            )

    @property
    def _tolerance(self) -> float:
        handle = self.engine.handle
        dtypes = (handle.dtype, sync_dtype(self.config.weight_sync, handle))
        is_coarser = handle.is_mixture or handle.model.fp8 is not None
        return max(TOLERANCES[dtype] for dtype in dtypes) * (COARSER if is_coarser else 1.0)

    def squares(self, completions: list[Completion]) -> Tensor:
        """The mean square difference of log-probabilities in each completion, [N]. They go on with the prompts in
        turn."""
        handle = self.engine.handle
        sequences = [
            _sequence(self.prompts[number % len(self.prompts)], completion)
            for number, completion in enumerate(completions)
        ]
        packed = pack_step(sequences, self.config.batch, handle.layout, handle.flops)
        scored = self.engine.add_logprobs(packed.microbatches, "logprobs")
        return sums_of_sequences(scored, _square_errors, handle.layout) / self.num_tokens


def _square_errors(microbatch: Microbatch) -> Tensor:
    theirs, ours = (microbatch.values[name].double() for name in ("rollout_logprobs", "logprobs"))
    return (theirs - ours).square()


def _sequence(prompt: list[int], completion: Completion) -> TokenSequence:
    before = len(prompt)
    return TokenSequence(
        torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * before + [True] * len(completion.token_ids)),
        {"rollout_logprobs": torch.tensor([0.0] * before + completion.logprobs, dtype=torch.float64)},
    )
