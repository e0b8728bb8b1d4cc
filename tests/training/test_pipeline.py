import pytest
import torch

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.pipeline import assemble, resolve_device


@pytest.mark.parametrize(
    ("name", "gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_gpu_always_has_its_number(monkeypatch, name, gpus, device):
    """``torch.cuda.set_device`` refuses a device without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize(("name", "gpus"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, name, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UsageError, match=f"device: {name}: this machine offers {gpus} CUDA devices"):
        resolve_device(name)


def test_a_stage_that_must_not_run_is_blamed_on_who_asked_for_it(tmp_path):
    (tmp_path / "below.yaml").write_text(
        "name: below\nextends: marl_baseline.yaml\noptimization:\n  amp: {dtype: bf16}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nextends: below.yaml\ndevice: cpu\noptimization: {amp: {dtype: fp16}}\n"
    )
    with pytest.raises(RecipeError, match=r"mine\.yaml:4:\d+: optimization\.amp: fp16 on a CPU"):
        assemble(load(tmp_path / "mine.yaml", (), Registry()))
    with pytest.raises(RecipeError, match=r"override"):
        assemble(load(tmp_path / "below.yaml", ["optimization.amp.dtype=fp16", "device=cpu"], Registry()))
