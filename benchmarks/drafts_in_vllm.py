"""The part of drafts.py that runs in vLLM's environment: reads what to do from standard input, prints JSON lines."""

import json
import sys
import time
from typing import Any


def main() -> None:
    asked = json.loads(sys.stdin.read())
    from vllm import LLM, SamplingParams

    further: dict[str, Any] = {}
    if asked["drafts"]:
        further["speculative_config"] = {"method": "mtp", "num_speculative_tokens": asked["drafts"]}
    if asked["tiny"]:
        further |= {"enforce_eager": True, "gpu_memory_utilization": 0.2, "dtype": "float32"}
    llm = LLM(
        model=asked["checkpoint"], max_model_len=1024, max_num_seqs=512, disable_log_stats=False, seed=0, **further
    )
    for at_once in asked["at_once"]:
        prompts: Any = [{"prompt_token_ids": p} for p in (asked["prompts"] * at_once)[:at_once]]
        params = SamplingParams(temperature=1.0, max_tokens=asked["new_tokens"], ignore_eos=True, logprobs=0)
        llm.generate(prompts, params, use_tqdm=False)  # compiles, and fills caches
        before, started = counts(llm), time.perf_counter()
        for _ in range(3):
            written = llm.generate(prompts, params, use_tqdm=False)
        seconds = (time.perf_counter() - started) / 3
        tokens = sum(len(one.outputs[0].token_ids) for one in written)
        drafted, accepted = (after - old for after, old in zip(counts(llm), before, strict=True))
        result = {"at_once": at_once, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds)}
        if drafted:
            result["accepted"] = round(accepted / drafted, 3)
        print(json.dumps(result), flush=True)


def counts(llm: Any) -> tuple[int, int]:
    """Tokens that were drafted, and those of them that were taken."""
    found = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec_decode_num" in metric.name and "value" in vars(metric)
    }
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return tuple(int(found.get(name, 0)) for name in names)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
