"""Loaded by every worker of a vLLM that is split over several GPUs, which is a process of its own.

vLLM loads it as its extension of workers (`worker_extension_cls`); it imports nothing of this package.
"""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

WeightTransferEngineFactory.register_engine("same_device", "vllm_same_device", "SameDeviceEngine")


class SplitWorker:
    """Adds nothing to vLLM's worker: it makes vLLM import this file, and so know the weight transfer."""
