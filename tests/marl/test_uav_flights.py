"""What is drawn is what was evaluated."""

import pytest
import torch
from canvases import cut, kept, told

from runner.api import Context, Slots
from runner.plugins.marl.simulator_config import EvaluationConfig
from runner.plugins.marl.uav import source as uav
from runner.plugins.marl.uav.config import UavConfig


class Wandering:
    """A policy whose agents turn a little, each episode by its own start."""

    def predict(self, observation):
        return torch.tanh(observation[..., :2] * 3 - 1)


@pytest.mark.parametrize("limit", [12, 1000])
def test_flights_have_the_outcomes_lengths_and_formation_of_the_evaluation(limit, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(uav, "draw", lambda flights, title, path: drawn.append((flights, title, path)))
    config = UavConfig(episode_limit=limit, evaluation=EvaluationConfig(episodes=uav.DRAWN, seed=5))
    source = uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0, batch_size=8))
    metrics = source.evaluate(Wandering())
    source.render(Wandering(), tmp_path / "flights.png")
    ((flights, title, path),) = drawn
    assert (len(flights), title) == (uav.DRAWN, "the first 6 of 6 held-out episodes")
    assert path == tmp_path / "flights.png"
    outcomes = [flight.outcome for flight in flights]
    for metric, outcome in zip(("success_rate", "collision_rate", "timeout_rate"), uav.OUTCOMES, strict=True):
        assert metrics[metric] == pytest.approx(outcomes.count(outcome) / uav.DRAWN)
    formation = sum(flight.formation for flight in flights) / uav.DRAWN
    assert metrics["formation_rate"] == pytest.approx(formation, abs=1e-3)
    reached = [len(flight.path) - 1 for flight in flights if flight.outcome == "goal"]
    assert metrics["steps_to_goal"] == pytest.approx(sum(reached) / len(reached) if reached else limit)
    for flight in flights:
        moved = torch.linalg.vector_norm(flight.path[1:, 0] - flight.path[:-1, 0], dim=-1)
        assert moved.max() <= 20.01  # the leader's top speed, so nothing is left out
        assert flight.path.shape[1] == 4


def test_only_the_first_episodes_of_many_are_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(uav, "draw", lambda flights, title, path: drawn.append((flights, title)))
    config = UavConfig(followers=1, episode_limit=30, evaluation=EvaluationConfig(episodes=20, seed=5))
    uav.UavSource(config, Context(torch.device("cpu"), Slots(), 0)).render(Wandering(), tmp_path / "flights.png")
    ((flights, title),) = drawn
    assert (len(flights), title) == (uav.DRAWN, "the first 6 of 20 held-out episodes")


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
