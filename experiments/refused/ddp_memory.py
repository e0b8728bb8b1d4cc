"""Counts the bytes of a training in one process and in two with DistributedDataParallel.

python experiments/refused/ddp_memory.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from recording import Figure, record
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PROCESSES = 2


def state_bytes(network: nn.Module) -> int:
    """Returns the bytes of parameters, gradients and Adam's moments after one step."""
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    parameters = list(network.parameters())
    tensors = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    for entry in optimizer.state.values():
        tensors += [value for value in entry.values() if value.dim()]
    return sum(tensor.nbytes for tensor in tensors)


def build() -> nn.Module:
    """Returns a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))


def work(rank: int, folder: str) -> None:
    """Trains in one of the processes and writes its bytes to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    size = state_bytes(DistributedDataParallel(build()))
    (Path(folder) / f"{rank}").write_text(str(size))
    dist.destroy_process_group()


def main() -> None:
    """Measures and records."""
    single = state_bytes(build())
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
        sizes = [int((Path(folder) / f"{rank}").read_text()) for rank in range(PROCESSES)]
    saved = 100 * (1 - max(sizes) / single)
    method = "bytes of parameters, gradients and Adam's moments after one step, exact; gloo"
    text = f"{max(sizes) / 2**20:.1f} MiB in each process, {single / 2**20:.1f} MiB in a single one"
    figures = [
        Figure("saved", "each of two processes", saved, "%", None, "", method),
        Figure("bytes", "each of two processes", max(sizes), "bytes", None, text, method),
    ]
    conclusion = (
        "Every process holds all parameters, gradients and moments. Only a sharded training (FSDP) divides them."
    )
    record("ddp_memory", "DistributedDataParallel as a saving of memory", conclusion, figures)


if __name__ == "__main__":
    main()
