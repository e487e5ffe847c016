"""Whether vLLM has the trainer's weights after a sync: its log-probabilities against the trainer's own.

    python benchmarks/vllm_sync.py PYTHON                 vLLM on the trainer's GPU, over IPC
    python benchmarks/vllm_sync.py PYTHON --device 1      on another one, over NCCL
    python benchmarks/vllm_sync.py PYTHON --server 1      by `vllm serve` on another one, over NCCL and HTTP
    ... --mixture                                         a mixture of experts

PYTHON is an interpreter with vLLM. A random bf16 model is trained for some steps, far from its checkpoint. vLLM,
started from that checkpoint, writes completions before and after syncs, and so does a vLLM that is started from the
trained weights on disk. Prints, for each, the mean and largest difference of log-probabilities to the trainer's.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from automodel_rl import Engine, ModelConfig, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import WeightSyncConfig
from automodel_rl.generator_messages import Request, Sampling, VllmSettings
from automodel_rl.generators.protocol import Completion, RankGenerator, results
from automodel_rl.generators.vllm_checks import connect_servers
from automodel_rl.generators.vllm_process import start_vllm
from automodel_rl.generators.vllm_servers import VllmServers
from automodel_rl.launch.local import free_port
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm import VllmNccl, VllmSameDevice

PROMPT, NEW, COUNT, VOCAB = 16, 48, 64, 4096
DENSE: dict[str, Any] = {"model_type": "qwen3", "intermediate_size": 3072}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
}
SAMPLING = Sampling(NEW)
SERVER_SECONDS = 180.0


def main() -> None:
    options = parse_arguments()
    quiet_libraries()
    folder = Path(tempfile.mkdtemp(prefix="automodel_rl_vllm_"))
    old, new = folder / "old", folder / "new"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SIZES, **(MIXTURE if options.mixture else DENSE))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(old)
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(old)  # a server needs one
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(old), dtype="bfloat16"))
    trainer = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
    server = start_server(options, old) if options.server is not None else None
    try:
        measure(options, handle, trainer, old, server)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    handle.save_pretrained(new)
    fresh = start(options, new)
    report("fresh vLLM of the new weights", trainer, results(fresh.submit(requests(COUNT))))
    fresh.close()


def measure(options: argparse.Namespace, handle: ModelHandle, trainer: Engine, source: Path, server: Any) -> None:
    generator: Any
    transport: Transport
    if server is not None:
        generator = VllmServers([server.url], connect_servers([server.url], routes=False), (), is_leader=True)
        transport = VllmNccl(generator.weights, handle.layout, 120.0)
    else:
        generator = start(options, source)
        if options.device is None:
            transport = VllmSameDevice(generator, handle.layout.device, 120.0)
        else:
            transport = VllmNccl(generator, handle.layout, 120.0)
    sync = WeightSync(handle, transport, WeightSyncConfig(buffer_mib=64.0, timeout=120.0))
    report("checkpoint", trainer, results(generator.submit(requests(COUNT))))
    microbatches = pack([sequence_of(request.prompt, []) for request in requests(COUNT)], 512)
    for _ in range(8):
        trainer.train_step(microbatches, sft_loss)
    report("old weights, new trainer (must be large)", trainer, results(generator.submit(requests(COUNT))))
    for _ in range(3):
        sync.send()
        say({"sync_seconds": round(sync.seconds, 3), "gb": round(sync.num_bytes / 1e9, 3)})
    report("after the sync", trainer, results(generator.submit(requests(COUNT))))
    running = generator.submit(requests(1000))
    sync.send()
    completions = results(running)
    say({"versions of requests that ran during a sync": sorted({c.versions for c in completions})})
    report("requests that ran during a sync of the same weights", trainer, completions[:COUNT])
    sync.disconnect()
    generator.close()


def start(options: argparse.Namespace, source: Path) -> RankGenerator:
    llm = {
        "model": str(source),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.2,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "weight_transfer_config": {"backend": "same_device" if options.device is None else "nccl"},
    }
    return start_vllm(options.python, VllmSettings(llm, ()), str(options.device or 0))


def start_server(options: argparse.Namespace, source: Path) -> Any:
    """`vllm serve`, once it answers."""
    port = free_port()
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(source), "--port", str(port)]
    flags = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512"]
    transfer = ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(options.server), "VLLM_SERVER_DEV_MODE": "1"}
    limits = ["--gpu-memory-utilization", "0.2"]
    process: Any = subprocess.Popen([*command, *flags, *transfer, *limits], env=environment)
    process.url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{process.url}/health", timeout=5).close()
            return process
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def requests(count: int) -> list[Request]:
    prompts = torch.randint(0, VOCAB, (count, PROMPT), generator=torch.Generator().manual_seed(1))
    return [Request(prompt.tolist(), seed, SAMPLING) for seed, prompt in enumerate(prompts)]


def sequence_of(prompt: list[int], completion: list[int]) -> TokenSequence:
    ids = torch.tensor([*prompt, *completion])
    return TokenSequence(ids, torch.ones(len(ids), dtype=torch.bool))


def report(what: str, trainer: Engine, completions: Sequence[Completion]) -> None:
    """Prints how far the generator's log-probabilities are from the trainer's."""
    pairs = list(zip(requests(len(completions)), completions, strict=True))
    differences = []
    for start_ in range(0, len(pairs), 8):  # one sequence a microbatch, so that they keep their order
        some = pairs[start_ : start_ + 8]
        microbatches = [
            microbatch for request, c in some for microbatch in pack([sequence_of(request.prompt, c.token_ids)], 512)
        ]
        for (_, completion), own in zip(some, trainer.logprobs(microbatches), strict=True):
            differences.append(own[PROMPT:].double().cpu() - torch.tensor(completion.logprobs, dtype=torch.float64))
    difference = torch.cat(differences).abs()
    say({"logprobs": what, "mean": round(difference.mean().item(), 5), "max": round(difference.max().item(), 4)})


def say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--device", type=int)
    parser.add_argument("--server", type=int)
    parser.add_argument("--mixture", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
