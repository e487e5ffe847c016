"""Opens what every run needs: run directory, tokenizer, model and loss."""

import inspect
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl.config import RunConfig
from automodel_rl.config.further_models import FurtherModel
from automodel_rl.data.chat import ChatTokenizer, open_chat_tokenizer
from automodel_rl.errors import InputError
from automodel_rl.estimate.decide import with_memory_decided
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.hf.tokenizer import check_same_tokens
from automodel_rl.import_path import import_function
from automodel_rl.launch.watchdog import set_hang_limit
from automodel_rl.losses import LossFn
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.trackers import check_trackers
from automodel_rl.rollout.seeds import mixed_seed


@dataclass(frozen=True)
class OpenedRun:
    """The opened parts of a run, on each rank.

    Attributes:
        config: the config, with every `auto` of the step's memory resolved.
        directory: the run's files, only checked so far.
        further: the models beside it, by name.
    """

    config: Any
    directory: RunDirectory
    chat: ChatTokenizer
    handle: ModelHandle
    further: dict[str, ModelHandle] = field(default_factory=dict)


def open_run(config: RunConfig, resume: str) -> OpenedRun:
    """Opens what every run needs. A collective of all ranks.

    Raises:
        InputError: the config or the checkpoint is invalid. Most errors are found before weights are loaded.
    """
    directory = RunDirectory(config, config.output, resume)
    set_hang_limit(config.failures.hang_minutes)
    directory.take_nccl_traces()
    check_trackers(config.observe)
    _say_phase(f"loading {config.model.path} ...")
    model = OpenedModel.open(config.model)
    model.checked(config)
    chat = open_chat_tokenizer(config, model)
    further = {name: _opened_further(asked, config, chat) for name, asked in config.further_models.items()}
    config, decided = with_memory_decided(config, model, {name: opened for name, (_, opened) in further.items()})
    if decided:
        _say_phase(decided)
    handle = ModelHandle.load(model, config.parallel, config.memory, config.components)
    if handle.unused_tensors:
        _say_phase(
            f"{len(handle.unused_tensors)} tensors of the checkpoint, such as {handle.unused_tensors[0]}, belong to no "
            "part of the model: they are not trained, and exports keep them unchanged"
        )
    handles = {name: _load_further(*opened, config) for name, opened in further.items()}
    torch.manual_seed(mixed_seed(config.seed, dist.get_rank()))
    return OpenedRun(config, directory, chat, handle, handles)


def _opened_further(asked: FurtherModel, config: RunConfig, chat: ChatTokenizer) -> tuple[FurtherModel, OpenedModel]:
    """Opens a further model without loading its weights. Raises InputError if it does not fit the run."""
    try:
        opened = OpenedModel.open(asked.model)
        opened.check_layout(config.parallel, config.memory, config.components)
        check_same_tokens(chat.tokenizer, opened.tokenizer())
    except InputError as error:
        raise InputError(f"{asked.key}: {error}") from None
    return asked, opened


def _load_further(asked: FurtherModel, opened: OpenedModel, config: RunConfig) -> ModelHandle:
    _say_phase(f"loading {asked.model.path} ...")
    return ModelHandle.load(opened, config.parallel, config.memory, config.components, is_trained=asked.is_trained)


def _say_phase(text: str) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)


def choose_loss(config: RunConfig, default: LossFn) -> LossFn:
    """Returns the loss that the config names, or else the algorithm's own."""
    if config.loss_function is None:
        return default
    function = import_function("loss_function", config.loss_function)
    try:
        inspect.signature(function).bind("outputs", "microbatch")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"loss_function={config.loss_function}: cannot be called as function(outputs, microbatch) ({error}): set a "
            "function of these two arguments"
        ) from None
    return function
