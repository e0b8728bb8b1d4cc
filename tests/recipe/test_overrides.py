import pytest
from running import RECIPES

from runner.plugin.registry import Registry
from runner.recipe.loader import load


@pytest.mark.parametrize(
    ("sets", "overrides"),
    [
        ((), {}),
        (("data.followers=2", "data.followers=1"), {"data.followers": 1}),
        (("optimization.amp=off", "seed=7"), {"seed": 7, "optimization.amp": "off"}),
        (("optimization.fused_optimizer=on",), {"optimization.fused_optimizer": "on"}),
        (("optimization.amp={dtype: fp16}", "device=cuda"), {"device": "cuda", "optimization.amp.dtype": "fp16"}),
        (("model.gamma=[0.5, 1.0]",), {"model.gamma": [0.5, 1.0]}),
    ],
)
def test_what_was_assigned_is_told_from_what_stands_in_files(sets, overrides):
    assert load(RECIPES / "marl_phase2.yaml", sets, Registry()).overrides == overrides
