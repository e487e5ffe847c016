"""The process in which vLLM runs. It stands alone, for vLLM may live in an environment that has nothing else of ours.

python vllm_worker.py DESCRIPTOR

Messages over the connection of that descriptor, the first word being their kind:

    ("start", options of vllm.LLM, of vllm.SamplingParams) -> ("started",)
    ("generate", number, [(prompt, seed, temperature), ...])
        -> ("completions", number, [(token_ids, logprobs, finish, oldest version, newest version, routes), ...])
    weights, in vLLM's own terms, also while requests run:
    ("init", info)                                         -> ("ready",)
    ("begin", version, seconds)
    ("update", info)                                       -> ("taken",)
    ("commit", False)                                      -> ("committed", version, None)
    ("give up",)

("error", text) may take the place of the answer to a message about weights or to "start", and ("failed", number, text)
of completions. Checked with vLLM 0.23.0.
"""

import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    worker = Worker(Connection(int(sys.argv[-1])))
    while True:
        try:
            worker.turn()
        except EOFError:
            return


class Worker:
    """Generates and takes weights between two steps."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.engine: Any = None
        self.sampling: dict[str, Any] = {}
        self.version: int | None = 0  # those of the checkpoint; none in the middle of an update
        self.coming: int | None = None
        self.batches: dict[int, list[Any]] = {}
        self.oldest: dict[str, int | None] = {}

    def turn(self) -> None:
        """Handles what has come, else lets the engine make a step."""
        idle = not self.batches or self.version is None
        if idle or self.connection.poll():
            self.handle(self.connection.recv())
        else:
            self.step()

    def handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        try:
            if kind == "start":
                self.start(*rest)
                self.connection.send(("started",))
            elif kind == "generate":
                self.generate(*rest)
            elif kind == "init":
                self.engine.init_weight_transfer_engine({"init_info": rest[0]})
                self.connection.send(("ready",))
            elif kind == "begin":
                self.coming, self.version = rest[0], None
                self.engine.start_weight_update(is_checkpoint_format=True)
            elif kind == "update" and self.coming is not None:
                self.engine.update_weights({"update_info": rest[0]})
                self.connection.send(("taken",))
            elif kind == "commit" and self.coming is not None:
                self.commit()
            # Anything else belongs to an update that has failed, after which only a new process has whole weights.
        except Exception as error:
            traceback.print_exc()
            self.coming = None
            self.connection.send(("error", describe(error)))

    def start(self, options: dict[str, Any], sampling: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine("same_device", "vllm_same_device", "SameDeviceEngine")
        self.engine, self.sampling = LLM(**options), sampling

    def generate(self, number: int, requests: list[tuple[list[int], int, float]]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self.version is None:
            self.connection.send(("failed", number, "the engine has no complete weights: an update was interrupted"))
            return
        names: list[str] = []
        try:
            for place, (prompt, seed, temperature) in enumerate(requests):
                params = SamplingParams(seed=seed, temperature=temperature, logprobs=0, **self.sampling)
                params.output_kind = RequestOutputKind.FINAL_ONLY
                names.append(f"{number}/{place}")
                self.engine.llm_engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        except Exception as error:
            traceback.print_exc()
            self.engine.llm_engine.abort_request(names)
            self.connection.send(("failed", number, describe(error)))
            return
        self.batches[number] = [None] * len(requests)
        self.oldest |= dict.fromkeys(names, self.version)

    def step(self) -> None:
        try:
            outputs = self.engine.llm_engine.step()
        except Exception as error:
            traceback.print_exc()
            for number in self.batches:
                self.connection.send(("failed", number, describe(error)))
            raise SystemExit(1) from None  # what is left in vLLM of these requests would be taken for others'
        for output in outputs:
            if output.finished:
                self.finish(output)

    def finish(self, output: Any) -> None:
        number, place = map(int, output.request_id.split("/"))
        batch, completion = self.batches[number], output.outputs[0]
        scores = zip(completion.logprobs, completion.token_ids, strict=True)
        batch[place] = (
            list(completion.token_ids),
            [score[token].logprob for score, token in scores],
            completion.finish_reason,
            self.oldest.pop(output.request_id),
            self.version,
            completion.routed_experts,
        )
        if None not in batch:
            del self.batches[number]
            self.connection.send(("completions", number, batch))

    def commit(self) -> None:
        self.engine.finish_weight_update()
        # Keys and values of the old weights; running requests are computed again up to where they are.
        if not self.engine.llm_engine.reset_prefix_cache(reset_running_requests=bool(self.batches)):
            raise RuntimeError("vLLM keeps its cache of keys and values of the old weights")
        self.version, self.coming = self.coming, None
        self.connection.send(("committed", self.version, None))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


if __name__ == "__main__":
    main()
