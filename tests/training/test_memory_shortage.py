"""An update that runs out of an accelerator's memory."""

import pytest
import tiny_learners
import torch
from process_pairs import HEAD, PLUGINS
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import KEEP_BATCH, ExitCode, MemoryShortageError
from runner.tracking import Workspace
from runner.training.memory_shortage import KEPT_BATCH
from runner.training.outputs import NoOutput
from runner.training.run import run

MODULES = {"images": "model.blocks.1.0", "tokens": "model.1.0", "gan": "discriminator.0"}
"""Modules of the tiny learners."""
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 16 GiB"


@pytest.fixture
def shortage(monkeypatch):
    """Makes a module raise what torch raises, in the first update."""

    def begin(path):
        from runner.training.loop import Loop

        made = Loop.__init__

        def watched(loop, *arguments):
            made(loop, *arguments)
            names = {part: name for key, module in loop.pipeline.learner.modules().items()
                     for name, part in module.named_modules(prefix=key)}  # fmt: skip

            def fail(module, inputs):
                if names.get(module) == path:
                    raise torch.OutOfMemoryError(MESSAGE)

            handles.append(register_module_forward_pre_hook(fail))

        monkeypatch.setattr(Loop, "__init__", watched)

    handles = []
    yield begin
    for handle in handles:
        handle.remove()


def train(name, folder):
    path = folder / "recipe.yaml"
    path.write_text(f"name: {name}\n{HEAD}{tiny_learners.RECIPES[name]}")
    registry = Registry(PLUGINS)
    run(load(path, (), registry), registry, Workspace(), NoOutput())


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("name", MODULES)
def test_the_message_names_module_holders_batch_and_settings(name, shortage, monkeypatch, tmp_path):
    monkeypatch.setenv(KEEP_BATCH, "1")
    shortage(MODULES[name])
    with pytest.raises(MemoryShortageError) as error:
        train(name, tmp_path)
    message = str(error.value)
    assert error.value.exit_code is ExitCode.FAILED
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert message.startswith("update 1: module ")
    assert MODULES[name].rpartition(".")[0] in message.split("\n")[0]
    for words in ("Tried to allocate 20.00 MiB", "activations", "most of it hold", "possible fixes: ", "the batch: "):
        assert words in message, message
    assert message.partition("possible fixes: ")[2].partition("\n")[0].count(" or ") == 1
    assert "train.batch_size=" in message or "optimization." in message
    (kept,) = Workspace().runs.glob(f"*/{KEPT_BATCH}")
    tensors = load_file(kept)
    assert any(path.startswith("batch.") for path in tensors)
    assert len(tensors) >= len([path for path in tensors if path.startswith("batch.")]) >= 1


@pytest.mark.usefixtures("migrated_workspace")
def test_a_batch_is_kept_only_on_request(shortage, tmp_path):
    shortage(MODULES["images"])
    with pytest.raises(MemoryShortageError, match="--keep-batch keeps it"):
        train("images", tmp_path)
    assert not list(Workspace().runs.glob(f"*/{KEPT_BATCH}"))
