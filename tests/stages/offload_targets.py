"""Stages that offload activations on a CPU, to copies and to the bytes of files, and three that are wrong."""

import io
from typing import ClassVar

import torch

from runner.plugins.stages.activation_offload import ActivationOffload, ActivationOffloadConfig


class Copies:
    """Keeps copies in memory."""

    def store(self, tensor):
        return tensor.clone(memory_format=torch.preserve_format)

    def load(self, stored):
        return stored


class Serialized:
    """Keeps the bytes of a file with the tensor."""

    def store(self, tensor):
        file = io.BytesIO()
        torch.save((tensor.clone(memory_format=torch.preserve_format), tensor.stride()), file)
        return file.getvalue()

    def load(self, stored):
        tensor, stride = torch.load(io.BytesIO(stored), weights_only=True)
        assert tensor.stride() == stride
        return tensor


class HalfCopies(Copies):
    """Halves the memory by keeping 16 bits of each number."""

    def store(self, tensor):
        if not tensor.is_floating_point():
            return super().store(tensor)
        return tensor.bfloat16(), tensor.dtype

    def load(self, stored):
        if isinstance(stored, tuple):
            tensor, dtype = stored
            return tensor.to(dtype)
        return super().load(stored)


class OneBuffer(Copies):
    """Reuses the buffer of another tensor of the same shape, which is still needed."""

    def __init__(self):
        self.buffers = {}

    def store(self, tensor):
        key = (tensor.shape, tensor.dtype, tensor.stride())
        buffer = self.buffers.setdefault(key, torch.empty_like(tensor))
        buffer.copy_(tensor)
        return buffer


class LateCopies(Copies):
    """Returns the values of the previous update for a large tensor, as a copy that was not waited for does."""

    def __init__(self):
        self.previous = {}

    def store(self, tensor):
        key = (tensor.shape, tensor.dtype, tensor.stride())
        late = self.previous.get(key)
        self.previous[key] = super().store(tensor)
        return self.previous[key] if late is None else late


class OffloadHere(ActivationOffload):
    """Offloads to a target without a GPU."""

    def make_target(self, device):
        return self.config.target()


class OffloadHereConfig(ActivationOffloadConfig):
    """Offloads on a CPU."""

    kind: ClassVar[str] = "offload_copies"
    implementation = "OffloadHere"
    target: ClassVar[type] = Copies

    smallest: int = 0
    """Bytes from which a tensor is moved."""

    def inactive(self, setting):
        return None


class OffloadBytesConfig(OffloadHereConfig):
    """Offloads to the bytes of files."""

    kind: ClassVar[str] = "offload_bytes"
    target: ClassVar[type] = Serialized


class OffloadHalfConfig(OffloadHereConfig):
    """Rounds what it offloads."""

    kind: ClassVar[str] = "offload_half"
    target: ClassVar[type] = HalfCopies


class OffloadOneBufferConfig(OffloadHereConfig):
    """Overwrites what it has offloaded."""

    kind: ClassVar[str] = "offload_one_buffer"
    target: ClassVar[type] = OneBuffer


class OffloadLateConfig(OffloadHereConfig):
    """Returns offloaded tensors too early."""

    kind: ClassVar[str] = "offload_late"
    target: ClassVar[type] = LateCopies
