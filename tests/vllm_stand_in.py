"""Packages in vLLM's place, on the CPU: one samples with transformers and PEFT, the other one only counts."""

from pathlib import Path

LLM = '''
from types import SimpleNamespace as Object

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


__version__ = "0.33.0"


class SamplingParams:
    def __init__(self, **arguments):
        known = {"stop": (), "include_stop_str_in_output": True, **arguments}
        assert known.pop("logprobs") == 0 and known.pop("ignore_eos") and known.pop("include_stop_str_in_output")
        assert known.pop("detokenize") == bool(known["stop"])
        self.__dict__.update(known)


class LLM:
    def __init__(self, model, *, tokenizer, dtype, enable_lora, max_loras, logprobs_mode, **_):
        assert logprobs_mode == "processed_logprobs" and enable_lora
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.max_loras, self.model, self.names, self.waiting, self.llm_engine = max_loras, None, {}, {}, self

    def add_lora(self, request):
        assert request.lora_name not in self.names.values() and len(self.names) < self.max_loras
        self.names[request.lora_int_id] = request.lora_name
        if self.model is None:
            self.model = PeftModel.from_pretrained(self.base, request.lora_path, adapter_name=request.lora_name)
        else:
            self.model.load_adapter(request.lora_path, adapter_name=request.lora_name)
        return True

    def remove_lora(self, number):
        self.model.delete_adapter(self.names.pop(number))

    def add_request(self, name, prompt, params, lora_request):
        drawn = torch.Generator().manual_seed(params.seed)
        self.waiting[name] = Object(
            name=lora_request.lora_name, ids=[*prompt["prompt_token_ids"]], params=params, drawn=drawn, written=[]
        )

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name, None)

    def step(self):
        done = [self.output(name, one) for name, one in self.waiting.items() if self.write_token(one)]
        for output in done:
            del self.waiting[output.request_id]
        return done

    @torch.no_grad()
    def write_token(self, one):
        """Writes a token. Returns whether it is the last."""
        params = one.params
        self.model.set_adapter(one.name)
        logprobs = (self.model(torch.tensor([one.ids])).logits[0, -1] / (params.temperature or 1.0)).log_softmax(-1)
        drawn = int(torch.multinomial(logprobs.exp(), 1, generator=one.drawn))
        token = drawn if params.temperature else int(logprobs.argmax())
        one.ids.append(token)
        one.written.append((token, float(logprobs[token])))
        text = self.tokenizer.decode([token for token, _ in one.written])
        one.finish = "stop" if token in params.stop_token_ids or any(s in text for s in params.stop) else "length"
        return one.finish == "stop" or len(one.written) == params.max_tokens

    def output(self, name, one):
        completion = Object(
            token_ids=[token for token, _ in one.written],
            logprobs=[{token: Object(logprob=value)} for token, value in one.written],
            finish_reason=one.finish,
            routed_experts=None,
        )
        return Object(finished=True, request_id=name, outputs=[completion], num_cached_tokens=0)
'''

NUMBERS = """
import os
from types import SimpleNamespace as Object

IMAGE = 7

__version__ = "0.33.0"


class SamplingParams:
    def __init__(
        self, *, seed, temperature, logprobs, max_tokens, stop_token_ids, ignore_eos, top_p, top_k, detokenize
    ):
        assert logprobs == 0 and (top_p, top_k) in ((1.0, 0), (0.5, 3))
        assert (max_tokens, stop_token_ids, ignore_eos, detokenize) == (3, [2, 4], True, False)
        self.seed, self.temperature = seed, temperature

class LLM:
    def __init__(
        self, model, *, logprobs_mode, dtype="auto", enable_return_routed_experts=False, enable_sleep_mode=False,
        enable_lora=False, max_loras=0
    ):
        self.loras, self.max_loras = {}, max_loras
        self.asleep = set()
        if enable_sleep_mode:
            assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512"
            assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        self.says_routes = enable_return_routed_experts
        assert logprobs_mode == "processed_logprobs"
        if model == "missing":
            raise FileNotFoundError("no such model")
        assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ)
        self.loaded, self.waiting, self.llm_engine, self.open = 0, {}, self, False
        self.encoded = 0

    def add_lora(self, request):
        assert os.listdir(request.lora_path) and request.lora_int_id not in self.loras
        self.loras[request.lora_int_id] = request.lora_name
        assert len(self.loras) <= self.max_loras
        return True

    def remove_lora(self, number):
        del self.loras[number]
        return True

    def add_request(self, name, prompt, params, lora_request=None):
        if lora_request is not None:
            self.loaded = 100 + len(self.loras)
            assert self.loras[lora_request.lora_int_id] == lora_request.lora_name
        if prompt["prompt_token_ids"] == [99]:
            raise ValueError("the prompt is too long")
        ids = list(prompt["prompt_token_ids"])
        for picture in prompt.get("multi_modal_data", {"image": []})["image"]:
            place = ids.index(IMAGE)
            ids[place : place + 1] = [-IMAGE] * picture.width
            self.encoded += 1
        self.waiting[name] = [[abs(i) for i in ids], params, 3]

    def sleep(self, level):
        assert not self.waiting and not self.asleep and level in (1, 2)
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        (tag,) = tags
        assert tag == "weights" or self.asleep == {"kv_cache"}
        self.asleep.remove(tag)

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name, None)

    def step(self):
        assert not self.asleep
        print("noise on stdout")
        outputs = []
        for name, request in list(self.waiting.items()):
            prompt, params, left = request
            request[2] -= 1
            if request[2]:
                continue
            del self.waiting[name]
            ids = [params.seed % 7, self.loaded, len(prompt)]
            logprobs = [{i: Object(logprob=-params.temperature)} for i in ids]
            reason = {0: "abort", 1: "stop", 2: "length"}[params.seed % 7]
            routes = None
            if self.says_routes:
                import numpy as np

                routes = np.full((len(prompt) + len(ids) - 1, 2, 1), len(prompt), np.uint8)
            completion = Object(token_ids=ids, logprobs=logprobs, finish_reason=reason, routed_experts=routes)
            outputs.append(
                Object(
                    finished=True,
                    request_id=name,
                    prompt_token_ids=prompt,
                    outputs=[completion],
                    num_cached_tokens=self.encoded,
                )
            )
        return outputs

    def init_weight_transfer_engine(self, request):
        assert request["init_info"] == {"buffers": []}

    def start_weight_update(self):
        assert not self.open and "weights" not in self.asleep
        self.open = True

    def update_weights(self, request):
        assert self.open
        if request["update_info"]["names"] == ["bad"]:
            self.open = False
            raise ValueError("no parameter called bad")
        self.loaded += len(request["update_info"]["names"])

    def finish_weight_update(self):
        assert self.open
        self.open = False

    def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests == bool(self.waiting)
        return True

    def reset_encoder_cache(self):
        self.encoded = 0
"""
"""A module whose completions say what it was asked for: the seed, tensors that it has loaded, the prompt's tokens."""

OTHERS = {
    "vllm/lora/request.py": """
from types import SimpleNamespace


def LoRARequest(name, number, path):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)
""",
    "vllm/sampling_params.py": "class RequestOutputKind:\n    FINAL_ONLY = 2\n",
    "vllm/distributed/weight_transfer/factory.py": """
class WeightTransferEngineFactory:
    @staticmethod
    def register_engine(name, module, cls):
        assert (name, module, cls) == ('same_device', 'vllm_same_device', 'SameDeviceEngine')
""",
}
"""The modules besides the one with `LLM`."""


def write_vllm(folder: Path, module: str = LLM) -> None:
    """Writes the package into a folder for PYTHONPATH.

    Args:
        folder: the folder.
        module: text of the module with `LLM` and `SamplingParams`.
    """
    for name, text in {"vllm/__init__.py": module, **OTHERS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
