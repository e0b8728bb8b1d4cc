"""A stage that only trainings can judge, on any processor: amp has nothing to do on those without bf16 arithmetic."""

from runner.api import Stage, StageConfig, Statistical


class RoundingConfig(StageConfig):
    """Computes forwards in bf16, slow as it may be."""

    kind = "rounding"
    implementation = "Rounding"
    phase = 2
    claims = frozenset({"precision"})

    def contract(self, setting):
        return Statistical()


class Rounding(Stage):
    def attach(self, pipeline):
        import torch

        pipeline.slots.replace("precision", lambda: torch.autocast(pipeline.device.type, torch.bfloat16))
