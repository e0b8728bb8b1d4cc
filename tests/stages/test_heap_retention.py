import os
import subprocess
import sys
import types

import pytest
import torch

from runner.plugins.stages.heap_retention import HeapRetentionConfig

FAULTS = """
import resource, sys, types
import torch
from runner.plugins.stages.heap_retention import HeapRetention, HeapRetentionConfig

notes = []
HeapRetention(HeapRetentionConfig()).attach(types.SimpleNamespace(note=notes.append))
assert notes == []
numbers, blocks = map(int, sys.argv[1:])
for count in (20, 200, 200):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        kept = [torch.ones(numbers) for _ in range(blocks)]
        del kept
    if count == 200:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


@glibc
@pytest.mark.parametrize(("numbers", "blocks"), [(2**18, 40), (2**19, 16), (2**20, 4), (2**22, 4)])
def test_freed_blocks_are_used_again_without_the_kernel(numbers, blocks):
    """Without the stage it is luck of the heap's layout: none in one process, millions of faults in the next."""
    command = [sys.executable, "-c", FAULTS, str(numbers), str(blocks)]
    rounds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # The heap may still grow once in a round, and not in each.
    assert min(map(int, rounds)) < 100


@pytest.mark.parametrize(("device", "reason"), [("cuda", "torch keeps freed memory itself"), ("cpu", None)])
@glibc
def test_it_is_for_the_host(device, reason):
    found = HeapRetentionConfig().inactive(types.SimpleNamespace(device=torch.device(device)))
    assert found == reason or reason in found
