import os
import subprocess
import sys
import types

import pytest
import torch

from runner.plugins.stages.heap_retention import HeapRetention

FAULTS = """
import resource, sys, types
import torch
from runner.plugins.stages.heap_retention import HeapRetention

if sys.argv[1] == "on":
    notes = []
    HeapRetention(None).attach(types.SimpleNamespace(note=notes.append))
    assert notes == []
for count in (20, 200):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        blocks = [torch.ones(2**20) for _ in range(4)]
        del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


def faults(switch):
    command = [sys.executable, "-c", FAULTS, switch]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@glibc
def test_freed_blocks_are_used_again_without_the_kernel():
    assert faults("on") < 100 < faults("off")


@pytest.mark.parametrize(("device", "reason"), [("cuda", "torch keeps freed memory itself"), ("cpu", None)])
@glibc
def test_it_is_for_the_host(device, reason):
    found = HeapRetention(None).inactive(types.SimpleNamespace(device=torch.device(device)))
    assert found == reason or reason in found
