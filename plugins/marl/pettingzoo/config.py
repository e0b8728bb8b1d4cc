"""Settings of the PettingZoo source, without heavy imports."""

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from runner.api import Objective, SourceOutline

from ..simulator_config import EvaluationConfig, SimulatorConfig

ALLOWED = r"^(mpe2|pettingzoo\.(butterfly|sisl))\.[a-z0-9_]+_v[0-9]+$"
"""Modules that a recipe may name: a recipe must never be able to import arbitrary code."""


def _known_family(name: str) -> str:
    if not re.fullmatch(ALLOWED, name):
        raise ValueError(
            f"'{name}' is not an environment that a recipe may name; write mpe2.NAME_vN, "
            f"pettingzoo.sisl.NAME_vN or "
            "pettingzoo.butterfly.NAME_vN, for example mpe2.simple_spread_v3 (for others, "
            "write a plugin)"
        )
    return name


class PettingZooConfig(SimulatorConfig):
    """Any PettingZoo parallel environment with continuous actions, by the name of its module.

    The copies run one after another on the CPU, whatever the device of the learner. Actions in [-1,
    1] are mapped to each agent's bounds; agents with smaller observations or actions are padded
    with zeros; an agent that ends before the others observes zeros, has zero rewards and no actions
    any more. Environments of ``mpe2`` are created with ``continuous_actions: true`` unless the
    options override it. Evaluation reports ``return`` (mean over agents of the summed rewards) and
    ``episode_length``. Needs ``pip install 'proven-runner[pettingzoo]'``.
    """

    kind: ClassVar[str] = "pettingzoo"
    implementation = ".source:PettingZooSource"
    headline: ClassVar[tuple[str, ...]] = ("return",)
    objective = Objective("return", "maximize")

    environment: Annotated[
        str,
        AfterValidator(_known_family),
        Field(json_schema_extra={"pattern": ALLOWED}),
    ]
    """Module of the environment, for example ``mpe2.simple_spread_v3``."""
    options: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict
    )
    """Arguments for the environment, for example ``{N: 3, max_cycles: 25}``."""
    evaluation: EvaluationConfig = Field(
        default_factory=lambda: EvaluationConfig(episodes=50)
    )
    """How the deterministic policy is measured."""

    def outline(self, batch_size: int) -> SourceOutline:
        """Returns the shapes of transitions, for which one copy of the environment is made."""
        from .build import environment_maker
        from .layout import Layout

        layout = Layout(environment_maker(self.environment, self.options)())
        return self.transitions(
            batch_size,
            len(layout.agents),
            layout.observation_size,
            layout.action_size,
        )
