import json
import subprocess
import sys

import psutil

from runner.hardware import cpu_flags, hardware, usable_cores


def test_facts_are_plain_values_that_json_can_hold():
    facts = hardware()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"]
    assert 1 <= facts["cores"] == usable_cores() <= (psutil.cpu_count() or 1)
    assert facts["memory_gib"] >= 0


def test_threads_are_told_once_torch_is_imported():
    import torch

    assert hardware()["torch_threads"] == torch.get_num_threads()


def test_torch_is_not_imported_for_it():
    code = "import sys, runner.hardware as h; h.hardware(); h.cpu_flags(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_are_words():
    assert all(flag == flag.strip() and " " not in flag for flag in cpu_flags())
