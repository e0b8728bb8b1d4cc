import os
import subprocess
import sys
import types

import pytest
import torch

from runner.plugins.stages.heap_retention import HeapRetentionConfig

FAULTS = """
import os, resource, sys, types
import torch
from runner.plugins.stages.heap_retention import HeapRetention, HeapRetentionConfig

notes = []
HeapRetention(HeapRetentionConfig()).attach(types.SimpleNamespace(note=notes.append))
assert notes == []
for size in sys.argv[1:]:
    numbers, blocks = map(int, size.split("x"))
    # Each size has the heap of a process of its own.
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    faults = []
    for count in (20, 200, 200):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            kept = [torch.ones(numbers) for _ in range(blocks)]
            del kept
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(size, *faults[1:], flush=True)
    os._exit(0)
"""

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


@glibc
def test_freed_blocks_are_used_again_without_the_kernel():
    """Without the stage it is luck of the heap's layout: none in one process, millions of faults in the next."""
    sizes = [f"{numbers}x{blocks}" for numbers, blocks in [(2**18, 40), (2**19, 16), (2**20, 4), (2**22, 4)]]
    command = [sys.executable, "-c", FAULTS, *sizes]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == sizes
    for line in lines:
        rounds = line.split()[1:]
        # The heap may still grow once in a round, and not in each.
        assert min(map(int, rounds)) < 100, line


@pytest.mark.parametrize(("device", "reason"), [("cuda", "torch keeps freed memory itself"), ("cpu", None)])
@glibc
def test_it_is_for_the_host(device, reason):
    found = HeapRetentionConfig().inactive(types.SimpleNamespace(device=torch.device(device)))
    assert found == reason or reason in found
