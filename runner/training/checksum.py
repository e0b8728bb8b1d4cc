"""Checksums of the tensors of a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.system.tensor_trees import tensors


def checksum(state: Any) -> Tensor:
    """Returns a number for each tensor of a state that any single flipped bit changes."""
    sums = [
        torch.hash_tensor(tensor.detach().contiguous()).cpu()
        for tensor in tensors(state)
    ]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.uint64)
