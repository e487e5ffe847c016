"""Process of a vLLM generator. Imports nothing of this package, which vLLM's environment may not have.

    python vllm_worker.py DESCRIPTOR

The connection with that file descriptor delivers the rank's messages (generator_messages.py). vLLM is imported before
the first one, `Start`, which contains `VllmSettings`. Weights come by vLLM's own weight transfer, also while requests
run.
"""

import contextlib
import importlib.util
import io
import os
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PACKAGE = "automodel_rl"


def load_messages() -> types.ModuleType:
    """Loads generator_messages.py by its path, under its name in the package, to which pickles refer."""
    name = f"{PACKAGE}.generator_messages"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "generator_messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = types.ModuleType(PACKAGE)  # pickle imports the package before the module in it
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    messages: Any = load_messages()
    sys.path.insert(0, str(Path(__file__).parent))  # vLLM imports the weight transfer by its file name
    connection = Connection(int(sys.argv[-1]))
    worker = VllmWorker(connection, messages)
    is_waiting = threading.Event()
    threading.Thread(target=end_with, args=(os.getppid(), is_waiting), daemon=True).start()
    with contextlib.suppress(Exception):  # reported by `start`, which imports it again
        importlib.import_module("vllm").LLM  # noqa: B018 (modules behind it)
    is_waiting.set()
    try:
        worker.start(messages.receive_start(connection).settings)
    except EOFError:
        return
    except messages.ProtocolError as error:
        connection.send(messages.Failure(str(error)))
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(messages.Failure(describe(error)))
        return
    connection.send(messages.Answer("start", worker.warning))
    while True:
        try:
            worker.turn()
        except EOFError:
            return


def end_with(rank: int, is_waiting: threading.Event) -> None:
    """Ends this process when the rank is gone. Stops watching once `is_waiting`: then the connection shows it."""
    while not is_waiting.wait(1.0):
        if os.getppid() != rank:
            os._exit(0)


class VllmWorker:
    """Generates, and takes weights between two steps of vLLM. `messages` is the module generator_messages."""

    def __init__(self, connection: Connection, messages: Any):
        self.connection, self.messages = connection, messages
        self.engine: Any = None
        self.warning = ""
        self.ends: tuple[int, ...] = ()
        self.version: int | None = 0  # 0 is the checkpoint; None in the middle of a weight sync
        self.pending_version: int | None = None
        self.held: list[Any] = []  # Generate messages received during a weight sync
        self.num_unfinished: dict[int, int] = {}  # number of unfinished completions, by number of their Generate
        self.oldest: dict[str, int | None] = {}
        self.is_asleep = False
        self.prompts: dict[str, list[int]] = {}  # of requests with images
        self.adapters: dict[int, Any] = {}  # LoRARequests of loaded adapters, by weight sync

    def start(self, settings: Any) -> None:
        from vllm import LLM, __version__
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm_versions import be_quiet, know_model, untested

        WeightTransferEngineFactory.register_engine("same_device", "vllm_same_device", "SameDeviceEngine")
        self.warning = untested(__version__)
        know_model(settings.options["model"])
        self.engine, self.ends = LLM(**settings.options), settings.ends
        be_quiet()
        if settings.options.get("enable_lora"):
            self.version = None  # requests need an adapter

    def turn(self) -> None:
        """Handles a pending message, or else runs a step of vLLM. Waits for a message if there is no work."""
        idle = not self.num_unfinished or self.version is None
        if idle or self.connection.poll():
            self.handle(self.connection.recv())
        else:
            self.step()

    def handle(self, message: Any) -> None:
        """Handles a message. After a failed weight sync, this process never has complete weights again."""
        known = self.messages
        try:
            match message:
                case known.Generate() if self.pending_version is not None:
                    self.held.append(message)
                case known.Generate():
                    self.generate(message)
                case known.Call("init_transfer", (info,)):
                    self.engine.init_weight_transfer_engine({"init_info": info})
                    self.answer("init_transfer")
                case known.Call("begin", (version, _)):
                    self.pending_version, self.version = version, None
                    self.engine.start_weight_update()
                case known.Call("load_weights", (info,)) if self.pending_version is not None:
                    self.engine.update_weights({"update_info": info})
                    self.answer("load_weights")
                case known.Call("commit") if self.pending_version is not None:
                    self.commit()
                case known.Call("load_adapter", (version, folder)):
                    self.load_adapter(version, folder)
                case known.Call("sleep", (level,)):
                    self.sleep(level)
                case known.Call("wake", (what,)):
                    self.wake(what)
                case known.Call("abort"):
                    self.abort()
                case known.Call("load_weights" | "commit"):
                    pass  # left over from a failed weight sync; only a new process gets complete weights
                case _:
                    raise known.unknown(message)
        except Exception as error:
            traceback.print_exc()
            self.abort()
            self.connection.send(known.Failure(describe(error)))

    def answer(self, verb: str, value: Any = None) -> None:
        self.connection.send(self.messages.Answer(verb, value))

    def generate(self, order: Any) -> None:
        if self.version is None or self.is_asleep:
            why = "it is asleep" if self.is_asleep else "a weight sync was interrupted, or none followed a sleep"
            text = f"the generator has no complete weights or no cache: {why}"
            self.connection.send(self.messages.GenerateFailed(order.number, text))
            return
        pictures: dict[Any, Any] = {}  # images of this message, shared by completions of one prompt
        self.num_unfinished[order.number] = len(order.requests)
        for index, request in enumerate(order.requests):
            try:
                self.add(f"{order.number}/{index}", request, pictures)
            except Exception as error:  # vLLM rejects this request, for example for its length
                traceback.print_exc()
                self.send_finished(order.number, index, self.messages.RawCompletion([], [], describe(error)))

    def add(self, name: str, request: Any, pictures: dict[Any, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, has_texts = request.sampling.for_vllm(self.ends), bool(request.sampling.stop)
        params = SamplingParams(logprobs=0, seed=request.seed, detokenize=has_texts, **sampling)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        prompt, adapter = prompt_of(request, pictures), self.adapters.get(self.version or 0)
        self.engine.llm_engine.add_request(name, prompt, params, lora_request=adapter)
        self.oldest[name] = self.version
        if request.media:
            self.prompts[name] = request.prompt

    def send_finished(self, number: int, index: int, written: Any) -> None:
        self.num_unfinished[number] -= 1
        if not self.num_unfinished[number]:
            del self.num_unfinished[number]
        self.connection.send(self.messages.Finished(number, index, written))

    def sleep(self, level: int) -> None:
        """Finishes all requests, and frees GPU memory. Level 2 drops the weights: requests fail until the next
        commit."""
        while self.num_unfinished and self.version is not None:
            self.step()
        if level == 2:
            self.version = None
        if not self.is_asleep:
            self.is_asleep = True
            self.engine.sleep(level=level)
        self.answer("sleep")

    def wake(self, what: str) -> None:
        """Allocates memory again: first for the weights, as vLLM restores buffers at the first call."""
        self.engine.wake_up([what])
        self.is_asleep = what == "weights"
        self.answer("wake")

    def step(self) -> None:
        try:
            outputs = self.engine.llm_engine.step()
        except Exception as error:
            traceback.print_exc()
            for number in self.num_unfinished:
                self.connection.send(self.messages.GenerateFailed(number, describe(error)))
            raise SystemExit(1) from None  # vLLM may still hold these requests, and mix them up with later ones
        for output in outputs:
            if output.finished:
                self.finish(output)

    def finish(self, output: Any) -> None:
        number, index = map(int, output.request_id.split("/"))
        completion, oldest = output.outputs[0], self.oldest.pop(output.request_id)
        scores = zip(completion.logprobs, completion.token_ids, strict=True)
        written = self.messages.RawCompletion(
            token_ids=list(completion.token_ids),
            logprobs=[score[token].logprob for score, token in scores],
            finish=self.finish_of(output),
            oldest=oldest,
            newest=self.version if not self.adapters else oldest,
            routes=completion.routed_experts,
            num_cached=output.num_cached_tokens,
        )
        self.send_finished(number, index, written)

    def finish_of(self, output: Any) -> str:
        """Returns why a completion ended. It is an error if vLLM's prompt has other image tokens than the trainer's."""
        asked = self.prompts.pop(output.request_id, None)
        if asked is None or asked == (found := list(output.prompt_token_ids)):
            return str(output.outputs[0].finish_reason)
        return (
            f"vLLM's image processor made a prompt of {len(found)} tokens, but the trainer's has {len(asked)}: use the "
            "checkpoint's own image processor in vLLM"
        )

    def load_adapter(self, version: int, folder: str) -> None:
        """Adds an adapter, and removes those that no running completion uses."""
        from vllm.lora.request import LoRARequest

        # A unique name: vLLM distinguishes cached keys and values of adapters by name.
        request = LoRARequest(f"version_{version}", version, folder)
        for old in self.adapters.keys() - {*self.oldest.values()}:
            self.engine.llm_engine.remove_lora(old)
            del self.adapters[old]
        if not self.engine.llm_engine.add_lora(request):
            raise RuntimeError(f"vLLM did not load the adapters of weight sync {version}")
        self.adapters[version] = request
        self.version = version
        self.answer("load_adapter", self.messages.Committed(version))

    def commit(self) -> None:
        self.engine.finish_weight_update()
        # The cache has keys and values of the old weights. Running requests are recomputed up to their last token.
        if not self.engine.llm_engine.reset_prefix_cache(reset_running_requests=bool(self.num_unfinished)):
            raise RuntimeError("vLLM did not drop its KV cache of the old weights")
        self.engine.llm_engine.reset_encoder_cache()  # of image embeddings
        self.version, self.pending_version = self.pending_version, None
        self.answer("commit", self.messages.Committed(self.version))
        self._take_held()

    def abort(self) -> None:
        """Ends a failed weight sync. Requests held for its weights fail."""
        self.pending_version = None
        self._take_held()

    def _take_held(self) -> None:
        held, self.held = self.held, []
        for order in held:
            self.generate(order)


def prompt_of(request: Any, pictures: dict[Any, Any]) -> dict[str, Any]:
    """Converts a request's prompt for vLLM, whose image processor expands a single token per image. `pictures` is a
    cache by source."""
    if not request.media:
        return {"prompt_token_ids": request.prompt}
    from PIL import Image
    from transformers.image_utils import load_image

    for source in {image.source for image in request.media} - pictures.keys():
        pictures[source] = load_image(Image.open(source if isinstance(source, str) else io.BytesIO(source)))
    rest = {index for image in request.media for index in range(image.start + 1, image.start + image.num_tokens)}
    for image in request.media:
        rest |= {image.start - 1, image.start + image.num_tokens} if image.framed else set()
    ids = [token for index, token in enumerate(request.prompt) if index not in rest]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [pictures[i.source] for i in request.media]}}


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


if __name__ == "__main__":
    main()
