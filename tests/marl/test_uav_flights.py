"""What is drawn is what was evaluated."""

import pytest
import torch
from canvases import cut, kept, told
from PIL import Image

from runner.api import Context, Slots
from runner.plugins.marl.simulator_config import EvaluationConfig
from runner.plugins.marl.uav import flights
from runner.plugins.marl.uav import source as uav
from runner.plugins.marl.uav.config import ObstaclesConfig, UavConfig


class Wandering:
    """A policy whose agents turn a little, each episode by its own start."""

    def predict(self, observation):
        return torch.tanh(observation[..., :2] * 3 - 1)


MOVING = ObstaclesConfig(count=6, speed=15, turn=0.1)


@pytest.mark.parametrize(("limit", "obstacles"), [(12, ObstaclesConfig()), (1000, ObstaclesConfig()), (40, MOVING)])
def test_flights_have_the_outcomes_lengths_and_formation_of_the_evaluation(limit, obstacles, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(uav, "draw", lambda paths, title, path: drawn.append((paths, title, path)))
    evaluation = EvaluationConfig(episodes=uav.DRAWN, seed=5)
    config = UavConfig(episode_limit=limit, evaluation=evaluation, obstacles=obstacles)
    source = uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0, batch_size=8))
    metrics = source.evaluate(Wandering())
    source.render(Wandering(), tmp_path / "flights.png")
    ((paths, title, path),) = drawn
    assert (len(paths), title) == (uav.DRAWN, "the first 6 of 6 held-out episodes")
    assert path == tmp_path / "flights.png"
    outcomes = [flight.outcome for flight in paths]
    for metric, outcome in zip(("success_rate", "collision_rate", "timeout_rate"), uav.OUTCOMES, strict=True):
        assert metrics[metric] == pytest.approx(outcomes.count(outcome) / uav.DRAWN)
    formation = sum(flight.formation for flight in paths) / uav.DRAWN
    assert metrics["formation_rate"] == pytest.approx(formation, abs=1e-3)
    reached = [len(flight.path) - 1 for flight in paths if flight.outcome == "goal"]
    assert metrics["steps_to_goal"] == pytest.approx(sum(reached) / len(reached) if reached else limit)
    for flight in paths:
        moved = torch.linalg.vector_norm(flight.path[1:, 0] - flight.path[:-1, 0], dim=-1)
        assert moved.max() <= 20.01  # the leader's top speed, so nothing is left out
        assert flight.path.shape[1] == 4
        assert flight.obstacles.shape == (len(flight.path), obstacles.count, 2)
        assert (flight.obstacles[1:] - flight.obstacles[:-1]).norm(dim=-1).max() <= obstacles.speed * 1.01
        distance = torch.cdist(flight.path[:, :1], flight.obstacles)[:, 0].amin(1)
        assert distance[:-1].min() > 19.99
        assert (distance[-1] < 20.01) == (flight.outcome == "collision")


def test_only_the_first_episodes_of_many_are_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(uav, "draw", lambda paths, title, path: drawn.append((paths, title)))
    config = UavConfig(followers=1, episode_limit=30, evaluation=EvaluationConfig(episodes=20, seed=5))
    uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0)).render(Wandering(), tmp_path / "flights.png")
    ((paths, title),) = drawn
    assert (len(paths), title) == (uav.DRAWN, "the first 6 of 20 held-out episodes")


@pytest.mark.parametrize("episodes", [1, 2])
def test_the_legend_says_what_is_drawn_and_is_not_cut(episodes, tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    config = UavConfig(episode_limit=30, evaluation=EvaluationConfig(episodes=episodes, seed=5))
    uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0)).render(Wandering(), tmp_path / "flights.png")
    figure = figures["flights"]
    assert told(figure) == {"leader", "followers", "formation", "goal", "obstacle", "obstacle in sight"}
    legend, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1
    assert [axes.get_xlim() for axes in figure.axes] == [figure.axes[0].get_xlim()] * episodes
    assert cut(figure) == []


def test_obstacles_that_move_are_where_they_were_at_each_step(tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    drawn = []
    panel_of = flights._Panel
    monkeypatch.setattr(flights, "_Panel", lambda axes, flight: drawn.append(panel_of(axes, flight)) or drawn[-1])
    evaluation = EvaluationConfig(episodes=2, seed=5)
    config = UavConfig(followers=1, episode_limit=9, evaluation=evaluation, obstacles=MOVING)
    source = uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0))
    source.render(Wandering(), tmp_path / "flights.png")
    source.render(Wandering(), tmp_path / "flights.gif")
    assert told(figures["flights"]) == {"leader", "followers", "formation", "goal", "obstacle", "obstacle in sight"}
    assert cut(figures["flights"]) == []
    for panel in drawn:
        assert len(panel.moving) == 1 + 2 + 3 * MOVING.count
        for step in (0, 4, 99):
            panel.show(step)
            for obstacle in panel.obstacles:
                path = obstacle.positions[: step + 1]
                assert [list(circle.center) for circle in obstacle.circles] == [path[-1]] * 2
                assert obstacle.path.get_xydata().tolist() == path
    with Image.open(tmp_path / "flights.gif") as animation:
        assert animation.n_frames == 10
