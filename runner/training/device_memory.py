"""Memory of a GPU, or of the host where a training has no other device."""

from __future__ import annotations

import torch

from runner.system.hardware import available_memory, peak_host_memory

CONTEXT_BYTES = 2**29
"""Approximate GPU memory of every process in addition to torch's."""


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that torch held on a GPU, or this process in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_memory()


def process_memory(device: torch.device) -> int:
    """Returns the most bytes that this process took of a GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
    return peak_host_memory()


def free_memory(device: torch.device) -> int:
    """Returns the bytes that are free on a GPU, or that this process can take of the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return available_memory()
