"""NCCL communicator with vLLM's workers, set up as vLLM's weight transfer expects.

vLLM is not installed beside this package, so the trainer's half of the setup is implemented here: serve a TCP store,
put the communicator's id there, pickled as vLLM's own class, and take part in a first all-reduce. It uses the libnccl
that torch has loaded. Tested with vLLM 0.23.0.
"""

import ctypes
import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.errors import WeightSyncError

ID_BYTES = 128
DTYPES = {
    torch.uint8: 1,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""Values of ncclDataType_t."""

SUM = 0
ID_KEY = "broadcast_from/0/0"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class NcclSender:
    """Rank 0 of a communicator with vLLM's workers. Its construction waits for them, so they must be joining already.

    Args:
        host, port: address of the store that it serves.
        world_size: number of workers plus one.
    """

    def __init__(self, host: str, port: int, world_size: int, device: torch.device, seconds: float):
        self.device = device
        torch.cuda.set_device(device)
        self.library = ctypes.CDLL("libnccl.so.2")
        # Same arguments as vLLM's workers use. Returns once all have connected.
        self.store = dist.TCPStore(
            host, port, world_size, is_master=True, timeout=datetime.timedelta(seconds=seconds), use_libuv=False
        )
        unique = _UniqueId()
        self._check(self.library.ncclGetUniqueId(ctypes.byref(unique)))
        self.store.set(ID_KEY, pickled_id(bytes(unique)))  # type: ignore[arg-type]  # bytes work as well
        self.communicator = ctypes.c_void_p()
        self._check(self.library.ncclCommInitRank(ctypes.byref(self.communicator), world_size, unique, 0))
        first = torch.zeros(1, device=device)
        stream = torch.cuda.current_stream(device)
        result = torch.empty_like(first)
        arguments = self._pointer(first), self._pointer(result), ctypes.c_size_t(1), DTYPES[torch.float32], SUM
        self._check(self.library.ncclAllReduce(*arguments, self.communicator, ctypes.c_void_p(stream.cuda_stream)))
        stream.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        """Queues a broadcast of a contiguous tensor on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        pointer, count = self._pointer(tensor), ctypes.c_size_t(tensor.numel())
        self._check(
            self.library.ncclBroadcast(pointer, pointer, count, DTYPES[tensor.dtype], 0, self.communicator, stream)
        )

    def abort(self) -> None:
        """Destroys the communicator and its pending work."""
        self.library.ncclCommAbort(self.communicator)

    def _check(self, code: int) -> None:
        if code:
            describe = self.library.ncclGetErrorString
            describe.restype = ctypes.c_char_p
            raise WeightSyncError(f"NCCL: {describe(code).decode()}")

    def _pointer(self, tensor: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())


def pickled_id(unique: bytes) -> bytes:
    """Pickles a communicator's id as vLLM's ncclUniqueId, a ctypes structure that cannot be imported here.

    The opcodes call _ctypes._unpickle with the class and (its attributes, its bytes).
    """
    assert len(unique) == ID_BYTES
    cls = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    state = b"}" + b"C" + bytes([ID_BYTES]) + unique + b"\x86"
    return b"\x80\x03" + b"c_ctypes\n_unpickle\n" + cls + state + b"\x86" + b"R" + b"."
