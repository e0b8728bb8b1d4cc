"""Memory for intermediate results of a convolution."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes to whose multiples tensors in one buffer are aligned, as torch's allocators align them."""
Workspace = Callable[[int, torch.device], Tensor]
"""From a number of bytes and a device to a buffer of at least that many bytes. The next call may
return it again.
"""


def new_workspace(count: int, device: torch.device) -> Tensor:
    """Returns a new buffer."""
    return torch.empty(count, dtype=torch.uint8, device=device)


def bytes_of(shapes: Sequence[Sequence[int]], itemsize: int) -> int:
    """Returns how large a buffer for tensors of these shapes is."""
    return sum(_aligned(math.prod(shape) * itemsize) for shape in shapes)


def take(
    workspace: Workspace, shapes: Sequence[Sequence[int]], like: Tensor
) -> list[Tensor]:
    """Returns uninitialised tensors of these shapes, all in one buffer, of the type and device of
    another tensor.

    A backend calls this once in a function, and keeps none of the tensors afterwards.
    """
    itemsize = like.element_size()
    buffer = workspace(bytes_of(shapes, itemsize), like.device)
    results = []
    offset = 0
    for shape in shapes:
        count = math.prod(shape) * itemsize
        results.append(buffer[offset : offset + count].view(like.dtype).view(*shape))
        offset += _aligned(count)
    return results


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class GrowingWorkspace:
    """Keeps a buffer for each thread, device and stream, which grows to the largest need.

    Threads do not share a buffer even on one stream: a kernel of one thread would overwrite what
    the next kernel of another thread is to read.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._bytes: dict[tuple[int, torch.device, int], int] = {}
        self.calls = 0

    def __call__(self, count: int, device: torch.device) -> Tensor:
        """Returns the buffer of this thread, device and stream."""
        buffers: dict[tuple[torch.device, int], Tensor] = vars(self._local).setdefault(
            "buffers", {}
        )
        # Kernels of two streams run at the same time, and would overwrite a common buffer.
        stream = 0
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        buffer = buffers.get((device, stream))
        if buffer is None or buffer.numel() < count:
            # The old buffer goes first, so that both are never in memory at a time.
            buffers.pop((device, stream), None)
            buffer = None
            buffer = buffers[device, stream] = new_workspace(count, device)
            with self._lock:
                self._bytes[threading.get_ident(), device, stream] = count
        with self._lock:
            self.calls += 1
        return buffer

    @property
    def largest_bytes(self) -> int:
        """Returns the bytes of the largest buffer that was made."""
        return max(self._bytes.values(), default=0)
