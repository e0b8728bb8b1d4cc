"""Plots of flights: complete as PNG, animated as GIF."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.api import UsageError

from .rewards import (
    COLLISION_RADIUS,
    FORMATION_RADIUS,
    GOAL_RADIUS,
    OBSTACLE_RADIUS,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from PIL.Image import Image

COLUMNS = 3
PANEL_INCHES = 2.6
DPI = {".png": 110, ".gif": 80}
FRAMES = 60
"""Largest number of frames of a GIF; for longer flights, steps are skipped."""
FRAME_MS = 120
LAST_FRAME_MS = 1500
X = (-5.0, 805.0)
Y = (705.0, -5.0)
"""The visible area: the field, and the formation of a leader at its edge. Like on a
screen, y grows downwards.
"""
TICKS_X = (0, 200, 400, 600, 800)
TICKS_Y = (0, 350, 700)
LEADER = "#d55e00"
FOLLOWER = "#0072b2"
OBSTACLE = "#666666"
GOAL = "#009e73"
"""Colours that the colour-blind can distinguish (Okabe and Ito 2008)."""


@dataclass(frozen=True)
class Flight:
    """An episode from its start to its end."""

    path: Tensor
    """[T + 1, N, 2]: positions of the agents, the leader first."""
    obstacles: Tensor
    """[T + 1, C, 2]: positions of the obstacles."""
    goal: Tensor
    """[2]."""
    outcome: str

    @property
    def formation(self) -> float:
        """Share of (step, follower) pairs with the follower within the formation radius of the
        leader.
        """
        offset = self.path[1:, 1:] - self.path[1:, :1]
        distance = torch.hypot(offset[..., 0], offset[..., 1])
        return float((distance < FORMATION_RADIUS).float().mean())


def draw(flights: Sequence[Flight], title: str, path: Path) -> None:
    """Draws flights side by side, into a file that ends in .png or .gif.

    Raises:
        UsageError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "drawing flights needs matplotlib: pip install 'proven-runner[plots]'"
        ) from error
    columns = min(COLUMNS, len(flights))
    rows = math.ceil(len(flights) / columns)
    with rc_context({"font.size": 8}):
        figure = Figure(
            figsize=(PANEL_INCHES * columns, 0.92 * PANEL_INCHES * rows + 0.5),
            layout="constrained",
        )
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        panels = [_Panel(*pair) for pair in zip(axes, flights, strict=False)]
        for unused in axes[len(flights) :]:
            unused.set_axis_off()
        figure.suptitle(title, fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), 2 * columns),
            frameon=False,
        )
        last_step = max(len(flight.path) for flight in flights) - 1
        if path.suffix == ".png":
            _show(panels, last_step)
            figure.savefig(path, dpi=DPI[".png"])
            return
        stride = math.ceil(last_step / FRAMES)
        steps = [*range(0, last_step, stride), last_step]
        frames = list(_frames(canvas, panels, steps))
        # The last frame stays for a while, because the animation is repeated.
        durations = [*[FRAME_MS] * (len(steps) - 1), LAST_FRAME_MS]
        frames[0].save(
            path,
            save_all=True,
            append_images=frames[1:],
            duration=durations,
            loop=0,
        )


def _frames(
    canvas: Any, panels: Sequence[_Panel], steps: Sequence[int]
) -> Iterator[Image]:
    """Yields images of steps."""
    from PIL import Image

    figure = canvas.figure
    figure.dpi = DPI[".gif"]
    artists = [artist for panel in panels for artist in panel.moving]
    for artist in artists:
        artist.set_animated(True)
    # A frame draws what moves alone: axes and their labels take ten times as long.
    canvas.draw()
    background = canvas.copy_from_bbox(figure.bbox)
    for step in steps:
        _show(panels, step)
        canvas.restore_region(background)
        for artist in artists:
            figure.draw_artist(artist)
        yield Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _show(panels: Sequence[_Panel], step: int) -> None:
    for panel in panels:
        panel.show(step)


class _Panel:
    """Axes with a flight: its scene, and the agents' paths up to a step."""

    def __init__(self, axes: Axes, flight: Flight) -> None:
        from matplotlib.patches import Circle

        self.path = flight.path.tolist()
        self.obstacles = [
            _Obstacle(axes, positions, has_label=index == 0)
            for index, positions in enumerate(flight.obstacles.unbind(1))
        ]
        x, y = flight.goal.tolist()
        goal = Circle(
            (x, y),
            GOAL_RADIUS,
            color=GOAL,
            alpha=0.4,
            linewidth=0,
            label="goal",
        )
        axes.add_patch(goal)
        self.formation = Circle(
            (0, 0),
            FORMATION_RADIUS,
            fill=False,
            edgecolor=LEADER,
            linewidth=0.6,
            linestyle="--",
            label="formation",
        )
        axes.add_patch(self.formation)
        followers = range(1, flight.path.shape[1])
        styles: list[dict[str, Any]] = [
            {
                "color": LEADER,
                "linewidth": 1.6,
                "markersize": 5,
                "zorder": 3,
                "label": "leader",
            }
        ]
        styles += [
            {
                "color": FOLLOWER,
                "linewidth": 0.8,
                "markersize": 4,
                "label": "followers" if agent == 1 else "_",
            }
            for agent in followers
        ]
        self.lines = [
            axes.plot([], [], marker="o", **style)[0] for style in styles
        ]
        axes.set(xlim=X, ylim=Y, aspect="equal", xticks=TICKS_X, yticks=TICKS_Y)
        axes.tick_params(labelsize=6)
        steps = len(self.path) - 1
        axes.set_title(
            f"{flight.outcome} after {steps} steps, formation {flight.formation:.0%}",
            fontsize=7,
        )

    @property
    def moving(self) -> list[Artist]:
        """The artists that ``show`` changes."""
        obstacles = [
            artist for obstacle in self.obstacles for artist in obstacle.moving
        ]
        return [*obstacles, self.formation, *self.lines]

    def show(self, step: int) -> None:
        """Shows the paths up to a step, or to the end of a shorter flight."""
        path = self.path[: step + 1]
        for agent, line in enumerate(self.lines):
            x = [positions[agent][0] for positions in path]
            y = [positions[agent][1] for positions in path]
            line.set_data(x, y)
            line.set_markevery([len(path) - 1])
        self.formation.set_center(tuple(path[-1][0]))
        for obstacle in self.obstacles:
            obstacle.show(step)


class _Obstacle:
    """An obstacle inside the circle in which it is in sight, and its path if it moves."""

    def __init__(
        self, axes: Axes, positions: Tensor, *, has_label: bool
    ) -> None:
        """Adds an obstacle to axes.

        Args:
            axes: Axes of a flight.
            positions: [T + 1, 2].
            has_label: Whether it is in the legend.
        """
        from matplotlib.patches import Circle

        self.positions = positions.tolist()
        start = tuple(self.positions[0])
        sight = Circle(
            start,
            OBSTACLE_RADIUS,
            fill=False,
            edgecolor=OBSTACLE,
            linestyle=":",
            label="obstacle in sight" if has_label else "_",
        )
        axes.add_patch(sight)
        body = Circle(
            start,
            COLLISION_RADIUS,
            color=OBSTACLE,
            label="obstacle" if has_label else "_",
        )
        axes.add_patch(body)
        self.circles = (sight, body)
        self.path: Line2D | None = None
        if self.positions[0] != self.positions[-1]:
            # A dot for every step.
            self.path = axes.plot(
                [],
                [],
                color=OBSTACLE,
                linewidth=0.4,
                marker=".",
                markersize=1.5,
                label="_",
            )[0]

    @property
    def moving(self) -> list[Artist]:
        """The artists that ``show`` changes; none of an obstacle that does not move."""
        return [] if self.path is None else [*self.circles, self.path]

    def show(self, step: int) -> None:
        """Shows the obstacle at a step, or at the end of a shorter flight."""
        path = self.positions[: step + 1]
        for circle in self.circles:
            circle.set_center(tuple(path[-1]))
        if self.path is not None:
            self.path.set_data(*zip(*path, strict=True))
