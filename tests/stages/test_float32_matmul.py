import types

import pytest
import torch
from builders import Holder, build_masac, parameters, train, works

from runner.api import Progress
from runner.plugins.stages.float32_matmul import Float32MatmulConfig


def stage(precision="medium"):
    return Float32MatmulConfig(precision=precision)


def test_a_cpu_has_no_tf32_and_the_stage_says_so():
    setting = types.SimpleNamespace(device=torch.device("cpu"))
    assert "no TF32" in stage("high").inactive(setting)
    assert stage().inactive(setting) is None


def test_the_precision_changes_inside_the_update_only_also_when_it_fails():
    learner = build_masac([stage()])
    seen = []
    step = learner.slots.targets
    learner.slots.replace("targets", lambda *args: seen.append(torch.get_float32_matmul_precision()) or step(*args))
    train(learner, 1)
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError):
        learner.slots.update({}, {}, Progress("updates", 1))
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_the_note_says_is_what_the_update_does():
    learner = build_masac()
    holder = Holder(learner, 8)
    works(stage()).attach(holder)
    (note,) = holder.notes
    baseline = build_masac()
    train(learner, 1)
    train(baseline, 1)
    one, other = parameters(learner), parameters(baseline)
    largest = max((one[name] - other[name]).abs().max().item() for name in one)
    assert largest < (1e-4 if note.startswith("true float32") else 0.02)
