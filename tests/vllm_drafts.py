"""What vLLM writes with a checkpoint's own layer for drafts (speculative decoding), by the interpreter of its
environment: python tests/vllm_drafts.py CHECKPOINT PROMPTS OUTPUT."""

import json
import sys
from pathlib import Path
from typing import Any

NEW_TOKENS = 24


def main() -> None:
    checkpoint, prompts, output = sys.argv[1:]
    from vllm import LLM, SamplingParams

    drafts: Any = {"method": "mtp", "num_speculative_tokens": 1}
    llm = LLM(
        model=checkpoint, dtype="float32", max_model_len=128, enforce_eager=True, speculative_config=drafts,
        disable_log_stats=False, gpu_memory_utilization=0.2,  # of the memory of the host, on a CPU
    )  # fmt: skip
    tokens: Any = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    written = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    counts = {metric.name.rpartition(":")[2]: metric.value for metric in llm.get_metrics() if "value" in vars(metric)}
    found = {
        "completions": [list(one.outputs[0].token_ids) for one in written],
        "drafts": int(counts["spec_decode_num_drafts"]),
        "accepted": int(counts["spec_decode_num_accepted_tokens"]),
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
