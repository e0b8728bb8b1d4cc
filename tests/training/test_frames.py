"""A reader follows a value from the command line to the network without opening a dozen files."""

import sys
from pathlib import Path

import pytest
import torch
from running import train_here

ROOT = Path(__file__).parents[2]
OWN = (str(ROOT / "runner"), str(ROOT / "plugins"))
MOST = 10

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def own_frames():
    """Functions of our own between the verb and the layer that asks, the outermost first."""
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        names.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    own = [(Path(name).stem, function) for name, function in names if name.startswith(OWN)]
    while own[0][1] == "forward":  # of networks inside networks
        own.pop(0)
    return own[::-1]


@pytest.mark.parametrize(
    ("recipe", "length"), [("digits_classifier", "train.epochs=1"), ("marl_baseline", "train.env_steps=80")]
)
def test_few_calls_lie_between_the_verb_and_the_network(monkeypatch, recipe, length):
    deepest = []

    def linear(self, inputs):
        if torch.is_grad_enabled():
            deepest.append(own_frames())
        return original(self, inputs)

    original = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", linear)
    train_here(recipe, length)
    frames = max(deepest, key=len)
    assert frames[0] == ("run", "run")
    assert len(frames) <= MOST, frames
