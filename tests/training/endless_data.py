"""Data and episodes that do not come to an end: ``--plugin`` takes this file beside ``toys.py``."""

import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from toys import Words, WordsConfig

from runner.api import Objective
from runner.plugins.marl.simulator import EnvironmentStep, SimulatorSource
from runner.plugins.marl.simulator_config import SimulatorConfig
from runner.training import signals, stall_report

# Tests wait for these times.
signals.GRACE_SECONDS = 0.5
signals.UNWINDING_SECONDS = 0.75
stall_report._LOOK_SECONDS = 0.05

ENDLESS_SAMPLE = 3


class EndlessWordsConfig(WordsConfig):
    """The words of the toys; something in them does not return."""

    kind = "endless_words"
    implementation = "EndlessWords"
    where: str = "draw"
    begun: str = ""
    """A file that is written when something does not return any more."""


class EndlessWords(Words):
    def datasets(self, config):
        self.where = config.where
        self.begun = config.begun
        train, held_out = super().datasets(config)
        return (Samples(train["words"], config.begun) if self.where == "sample" else train), held_out

    def draw(self, batch_size, progress):
        if self.where == "draw" and progress.updates >= 2:
            stay(self.begun)
        return super().draw(batch_size, progress)

    def evaluate(self, learner):
        if self.where == "evaluate" and self.consumed:
            stay(self.begun)
        return super().evaluate(learner)


class Samples(Dataset):
    """Sentences of which one is never read to its end; the first one shows what they look like."""

    def __init__(self, words, begun):
        self.words = words
        self.begun = begun

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        if index == ENDLESS_SAMPLE:
            stay(self.begun)
        return {"words": self.words[index]}


class EndlessEpisodesConfig(SimulatorConfig):
    """Agents that walk on and on."""

    kind = "endless_episodes"
    implementation = "EndlessEpisodes"
    objective = Objective("return", "maximize")
    begun: str = ""


class EndlessEpisodes(SimulatorSource):
    def make_environment(self, config, envs, device, generator):
        return Walk(config.begun, envs)


class Walk:
    """An environment whose episodes have no end."""

    agents, observation_size, action_size = 2, 1, 1

    def __init__(self, begun, envs):
        self.begun = begun
        self.place = torch.zeros(envs, 2, 1)
        self.steps = 0

    def reset(self):
        self.steps = 0
        return self.place.clone()

    def step(self, action):
        self.steps += 1
        # No training of a test makes so many steps: this is an evaluation.
        if self.steps == 500:
            Path(self.begun).touch()
        never = torch.zeros(len(self.place), dtype=torch.bool)
        return EnvironmentStep(
            self.place.clone(),
            self.place.clone(),
            torch.zeros(len(self.place), 2),
            never,
            never,
            torch.zeros(len(self.place), 2),
        )

    def summarise(self, total):
        return {"return": total[1] / total[0]}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stay(begun):
    Path(begun).touch()
    while True:
        time.sleep(0.01)
