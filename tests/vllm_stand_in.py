"""A package in vLLM's place that samples with transformers and PEFT, on the CPU: slow, and to be compared with."""

from pathlib import Path

LLM = '''
from types import SimpleNamespace as Object

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


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
