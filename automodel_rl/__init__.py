"""Post-training of Hugging Face language models in plain PyTorch, on any parallel layout, with packed sequences.

The public names are imported on first use, so that `import automodel_rl` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_rl.batch import (
        Audio,
        Batch,
        DataShare,
        Image,
        Microbatch,
        RouterShape,
        Routes,
        TokenSequence,
        Video,
        in_packed_order,
        pack,
        read_routes,
        unpack,
    )
    from automodel_rl.config import (
        ComponentsConfig,
        CorrectionConfig,
        DPOLossConfig,
        EncoderComponent,
        KLConfig,
        LanguageComponent,
        LoraConfig,
        MemoryConfig,
        ModelConfig,
        MoEConfig,
        MuonConfig,
        OffloadConfig,
        OptimizerConfig,
        ParallelConfig,
        ParameterGroupConfig,
        PolicyLossConfig,
        RejectConfig,
        RolloutRunConfig,
        RunConfig,
        SFTLossConfig,
        load_config,
    )
    from automodel_rl.config.algorithms import DPOConfig, GRPOConfig, SFTConfig
    from automodel_rl.data.show import ShownExample, first_examples
    from automodel_rl.engine import Engine, TrainOutput
    from automodel_rl.errors import InputError, MicrobatchError
    from automodel_rl.generators.fleet import Fleet
    from automodel_rl.losses import (
        LinearLoss,
        LossOutput,
        Readout,
        TokenOutputs,
        dft_loss,
        dpo_loss,
        grpo_loss,
        sft_loss,
        token_loss,
    )
    from automodel_rl.model.handle import ModelHandle
    from automodel_rl.optimizers import AdamWSettings
    from automodel_rl.policy.policy import Policy
    from automodel_rl.rollout.rollouts import Rollouts
    from automodel_rl.step.agreement import GlobalBatch
    from automodel_rl.step.runner import StepRunner
    from automodel_rl.trainers.run import Goal, Run
    from automodel_rl.trainers.train import run_program, train

_HOMES = {
    "Batch": "batch",
    "DataShare": "batch",
    "Audio": "batch",
    "Image": "batch",
    "Video": "batch",
    "Microbatch": "batch",
    "RouterShape": "batch",
    "Routes": "batch",
    "TokenSequence": "batch",
    "in_packed_order": "batch",
    "pack": "batch",
    "read_routes": "batch",
    "unpack": "batch",
    "CorrectionConfig": "config",
    "RejectConfig": "config",
    "DPOConfig": "config.algorithms",
    "DPOLossConfig": "config",
    "SFTLossConfig": "config",
    "GRPOConfig": "config.algorithms",
    "KLConfig": "config",
    "LanguageComponent": "config",
    "LoraConfig": "config",
    "MemoryConfig": "config",
    "MoEConfig": "config",
    "ModelConfig": "config",
    "ComponentsConfig": "config",
    "MuonConfig": "config",
    "ParameterGroupConfig": "config",
    "OffloadConfig": "config",
    "OptimizerConfig": "config",
    "ParallelConfig": "config",
    "PolicyLossConfig": "config",
    "RolloutRunConfig": "config",
    "RunConfig": "config",
    "SFTConfig": "config.algorithms",
    "EncoderComponent": "config",
    "load_config": "config",
    "ShownExample": "data.show",
    "first_examples": "data.show",
    "Engine": "engine",
    "TrainOutput": "engine",
    "InputError": "errors",
    "MicrobatchError": "errors",
    "LinearLoss": "losses",
    "LossOutput": "losses",
    "Readout": "losses",
    "TokenOutputs": "losses",
    "dpo_loss": "losses",
    "grpo_loss": "losses",
    "dft_loss": "losses",
    "sft_loss": "losses",
    "token_loss": "losses",
    "AdamWSettings": "optimizers",
    "ModelHandle": "model.handle",
    "StepRunner": "step.runner",
    "GlobalBatch": "step.agreement",
    "Fleet": "generators.fleet",
    "Policy": "policy.policy",
    "Rollouts": "rollout.rollouts",
    "Goal": "trainers.run",
    "Run": "trainers.run",
    "run_program": "trainers.train",
    "train": "trainers.train",
}

__all__ = [
    "AdamWSettings",
    "Audio",
    "Batch",
    "ComponentsConfig",
    "CorrectionConfig",
    "DPOConfig",
    "DPOLossConfig",
    "DataShare",
    "EncoderComponent",
    "Engine",
    "Fleet",
    "GRPOConfig",
    "GlobalBatch",
    "Goal",
    "Image",
    "InputError",
    "KLConfig",
    "LanguageComponent",
    "LinearLoss",
    "LoraConfig",
    "LossOutput",
    "MemoryConfig",
    "Microbatch",
    "MicrobatchError",
    "MoEConfig",
    "ModelConfig",
    "ModelHandle",
    "MuonConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterGroupConfig",
    "Policy",
    "PolicyLossConfig",
    "Readout",
    "RejectConfig",
    "RolloutRunConfig",
    "Rollouts",
    "RouterShape",
    "Routes",
    "Run",
    "RunConfig",
    "SFTConfig",
    "SFTLossConfig",
    "ShownExample",
    "StepRunner",
    "TokenOutputs",
    "TokenSequence",
    "TrainOutput",
    "Video",
    "dft_loss",
    "dpo_loss",
    "first_examples",
    "grpo_loss",
    "in_packed_order",
    "load_config",
    "pack",
    "read_routes",
    "run_program",
    "sft_loss",
    "token_loss",
    "train",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'automodel_rl' has no attribute {name!r}")
    from automodel_rl.launch.quiet import quiet_imports

    with quiet_imports():
        return getattr(importlib.import_module(f"automodel_rl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
