"""Bugs of attention and of the head, on one rank and where ranks share their work."""

import dataclasses
import importlib
import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch, local_microbatch
from tests.faults.fault import Fault, Verified, patch


def _window_too_wide() -> Any:
    from automodel_rl.model.attention import _mask

    def wider(num_queries: int, num_keys: int, is_causal: bool, window: int | None, device: Any) -> Tensor:
        return _mask(num_queries, num_keys, is_causal, None if window is None else window + 1, device)

    return patch("model.attention._mask", wider)


def _without(name: str) -> Any:
    """Attention leaves out one of its parameters."""
    from automodel_rl.model.attention import BACKENDS, eager

    def leaving_out(q: Tensor, k: Tensor, v: Tensor, call: Any, parameters: Any) -> Tensor:
        return eager(q, k, v, call, dataclasses.replace(parameters, **{name: None}))

    return mock.patch.dict(BACKENDS, {"eager": leaving_out})


def _sinks_without_gradient() -> Any:
    from automodel_rl.model.attention import BACKENDS, eager

    def detached(q: Tensor, k: Tensor, v: Tensor, call: Any, parameters: Any) -> Tensor:
        sinks = None if parameters.sinks is None else parameters.sinks.detach()
        return eager(q, k, v, call, dataclasses.replace(parameters, sinks=sinks))

    return mock.patch.dict(BACKENDS, {"eager": detached})


def _plain_rotary_embeddings() -> Any:
    from automodel_rl.hf.read import read_config

    def plain(*given: Any) -> Any:
        config = read_config(*given)
        config.rope_parameters = {**config.rope_parameters, "rope_type": "default"}
        return config

    return patch("hf.opened_model.read_config", plain)


def _states_that_leak(mixer: str) -> Any:
    """A token mixer takes the sequences of a microbatch for one."""
    module = importlib.import_module(f"automodel_rl.model.token_mixers.{mixer}")
    rule = module.chunked_rule

    def leaking(*tensors: Any) -> Tensor:
        return rule(*tensors[:-1], (len(tensors[0]),))

    return patch(f"model.token_mixers.{mixer}.chunked_rule", leaking)


def _keys_of_other_heads() -> Any:
    from automodel_rl.parallel.collectives import to_heads

    def turned(tensors: tuple[Tensor, ...], group: Any) -> tuple[Tensor, ...]:
        query, *others = tensors
        return to_heads((query, *(tensor.flip(1) for tensor in others)), group)

    return patch("model.attention.to_heads", turned)


def _heads_of_other_tokens() -> Any:
    from automodel_rl.parallel.collectives import from_heads

    return patch("model.attention.from_heads", lambda whole, group: from_heads(whole.roll(1, 0), group))


def _sinks_of_the_first_rank() -> Any:
    from automodel_rl.model.attention import replace

    def first(parameters: Any, sinks: Any = None, **others: Any) -> Any:
        taken = {} if sinks is None else {"sinks": parameters.sinks[: len(sinks)]}
        return replace(parameters, **taken, **others)

    return patch("model.attention.replace", first)


def _convolutions_that_leak() -> Any:
    from automodel_rl.model.token_mixers.whole_sequences import convolve

    def leaking(inputs: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        return convolve(inputs, weight, bias, torch.arange(len(offsets)))

    return patch("model.token_mixers.whole_sequences.convolve", leaking)


def _all_keys_seen() -> Any:
    """Queries see all keys, and not those that an indexer chooses."""
    return patch("model.sparse_attention.KeyIndex.seen", lambda index, queries, keys, causal: causal)


def _index_of_own_keys() -> Any:
    """A cp rank chooses keys of other ranks by the index of its own."""
    from automodel_rl.model.sparse_attention import KeyIndex

    def repeated(index: KeyIndex, group: Any) -> KeyIndex:
        return KeyIndex(index.queries, index.keys.repeat(group.size(), 1), index.weights, index.most)

    return patch("model.sparse_attention.KeyIndex.gathered", repeated)


def _keys_of_the_first_group() -> Any:
    from automodel_rl.model.token_mixers.mamba2 import _groups_of_heads

    return patch(
        "model.token_mixers.mamba2._groups_of_heads", lambda *arguments: torch.zeros_like(_groups_of_heads(*arguments))
    )


def _limits_of_steps_ignored() -> Any:
    from automodel_rl.model.token_mixers.mamba2 import StateDecay

    def unlimited(module: StateDecay, *parameters: Any) -> None:
        making(module, *parameters[:3], (0.0, math.inf))

    making = StateDecay.__init__
    return patch("model.token_mixers.mamba2.StateDecay.__init__", unlimited)


def _state_of_the_last_chunk_alone() -> Any:
    """A chunk of Kimi Delta Attention reads no state of the chunks before."""
    from automodel_rl.model.token_mixers import kimi_delta

    def of_chunks(*parts: Tensor) -> Tensor:
        chunks = zip(*(part.split(kimi_delta.CHUNK, dim=1) for part in parts), strict=True)
        return torch.cat([of_one_sequence(*chunk) for chunk in chunks], dim=1)

    of_one_sequence = kimi_delta._one_sequence
    return patch("model.token_mixers.kimi_delta._one_sequence", of_chunks)


def _short_convolutions_that_leak() -> Any:
    from automodel_rl.model.token_mixers.whole_sequences import convolve

    def leaking(inputs: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        return convolve(inputs, weight, bias, torch.arange(len(offsets)))

    return patch("model.token_mixers.short_convolution.convolve", leaking)


def _norm_of_own_columns() -> Any:
    from automodel_rl.parallel.tensor_parallel import _own_weight_forward

    return patch("parallel.tensor_parallel._wide_norm_forward", lambda _: _own_weight_forward)


def _family_without(fact: str) -> Any:
    from automodel_rl.families.known import FAMILIES

    return mock.patch.dict(FAMILIES, granite=dataclasses.replace(FAMILIES["granite"], **{fact: ""}))


def _tokens_restored_wrongly() -> Any:
    def turned(microbatch: Microbatch, *place: Any) -> LocalMicrobatch:
        made = local_microbatch(microbatch, *place)
        return made if made.restore is None else dataclasses.replace(made, restore=made.restore.roll(1))

    return patch("step.local_microbatches.local_microbatch", turned)


def _keys_of_own_rank() -> Any:
    """Gradients of gathered keys and values are cut, not summed."""
    from automodel_rl.parallel.collectives import AllGatherCP, _own_rows

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradients[0], ctx.group), None, None

    return mock.patch.object(AllGatherCP, "backward", staticmethod(backward))


def _first_chunk_again() -> Any:
    from automodel_rl.model.logprobs import _chunks

    def chunks(num_tokens: int, weight: Tensor) -> list[slice]:
        found = _chunks(num_tokens, weight)
        return [found[0], *found[:-2], found[-1]] if len(found) > 2 else found

    return patch("model.logprobs._chunks", chunks)


def _vocabulary_of_own_rank() -> Any:
    from automodel_rl.model.logprobs import _over_vocabulary

    def own(picked: Tensor, logsumexp: Tensor, mean: Any, group: Any) -> Any:
        total, _, mean = _over_vocabulary(picked, logsumexp, mean, group)
        return total, logsumexp, mean

    return patch("model.logprobs._over_vocabulary", own)


def _known_gradient_by_own_count() -> Any:
    """The gradient of a linear loss is divided by the count of its microbatch, not of the global batch."""
    from automodel_rl.losses import LinearLoss

    def gradient(loss: LinearLoss, microbatch: Microbatch, counts: object, readout: object) -> Tensor:
        return loss.weights(microbatch).double() / max(int(microbatch.loss_mask.sum()), 1)

    return mock.patch.object(LinearLoss, "gradient", gradient)


def _gradient_of_head_lost() -> Any:
    from automodel_rl.compat.fsdp import gradient_sum

    return patch("model.part_forward.gradient_sum", lambda unit, weight: gradient_sum(unit, weight).clone())


EXCHANGED = {"cp": 2, "cp_exchange": "all_to_all"}

FAULTS: dict[str, Fault] = {
    "a linear loss's gradient divided by its microbatch's count": Fault(
        _known_gradient_by_own_count, Verified("qwen3")
    ),
    "the head's gradient added to a copy of its sum": Fault(_gradient_of_head_lost, Verified("qwen3", {"pp": 2})),
    "rotary embeddings by the longest sequence": Fault(
        lambda: patch("support.model_rules.BY_LENGTH", ()),
        "unit/support/test_description.py::test_rotary_embeddings_that_depend_on_the_length_of_a_sequence_are_refused",
    ),
    "a window one key too wide": Fault(_window_too_wide, Verified("mistral")),
    "soft cap left out": Fault(lambda: _without("softcap"), Verified("gemma2")),
    "a factor of embeddings left out": Fault(lambda: _family_without("embedding_factor"), Verified("granite")),
    "a factor of logits left out": Fault(lambda: _family_without("logit_divisor"), Verified("granite")),
    "keys of other heads exchanged": Fault(_keys_of_other_heads, Verified("qwen3", EXCHANGED)),
    "heads exchanged for those of other tokens": Fault(_heads_of_other_tokens, Verified("qwen3", EXCHANGED)),
    "exchanged heads with sinks of the first rank": Fault(_sinks_of_the_first_rank, Verified("gpt_oss", EXCHANGED)),
    "sinks left out": Fault(lambda: _without("sinks"), Verified("gpt_oss")),
    "sinks without a gradient": Fault(_sinks_without_gradient, Verified("gpt_oss")),
    "the kind of rotary embeddings ignored": Fault(_plain_rotary_embeddings, Verified("ministral3")),
    "a norm over the columns of this tp rank": Fault(_norm_of_own_columns, Verified("olmo2", {"tp": 2})),
    "states of linear attention leak into the next sequence": Fault(
        lambda: _states_that_leak("gated_delta_net"), Verified("qwen3_5_text")
    ),
    "states of Kimi Delta Attention leak into the next sequence": Fault(
        lambda: _states_that_leak("kimi_delta"), Verified("kimi_linear")
    ),
    "states of Mamba-2 leak into the next sequence": Fault(
        lambda: _states_that_leak("mamba2"), Verified("granitemoehybrid")
    ),
    "limits of Mamba-2's steps ignored": Fault(
        _limits_of_steps_ignored,
        "distributed/parallel/test_parity.py::test_every_other_family_equals_one_process[granitemoehybrid]",
    ),
    "chunks of Kimi Delta Attention without the state before them": Fault(
        _state_of_the_last_chunk_alone,
        "unit/model/test_token_mixers.py::"
        "test_sequences_of_many_chunks_and_of_one_token_equal_the_rule_token_by_token[Kimi delta]",
    ),
    "heads of Mamba-2 take keys of another group": Fault(_keys_of_the_first_group, Verified("granitemoehybrid")),
    "short convolutions leak into the next sequence": Fault(_short_convolutions_that_leak, Verified("lfm2")),
    "convolutions leak into the next sequence": Fault(_convolutions_that_leak, Verified("qwen3_next")),
    "keys that no indexer chose": Fault(_all_keys_seen, Verified("deepseek_v32")),
    "keys of other cp ranks by the index of this one": Fault(_index_of_own_keys, Verified("deepseek_v32", {"cp": 2})),
    "cp tokens restored in another order": Fault(_tokens_restored_wrongly, Verified("qwen3", {"cp": 2})),
    "gradients of keys of this cp rank alone": Fault(_keys_of_own_rank, Verified("qwen3", {"cp": 2})),
    "chunks of the head after the first are the first": Fault(_first_chunk_again, Verified("qwen3")),
    "softmax over this tp rank's vocabulary": Fault(_vocabulary_of_own_rank, Verified("qwen3", {"tp": 2})),
}
