"""Stages that remember something by an identity or an address, which another tensor may have later."""

import torch
from wrong_base import Wrong, stage

from runner.api import Close, map_tensors


@stage("ends_by_address", Close(), hole=3)
class EndsByAddress(Wrong):
    """Remembers which episodes of a batch have ended by where the batch lies in memory."""

    def take_hold(self):
        self.kept = {}
        self.wrap("target", self.target)

    def target(self, step, batch, *rest):
        ended = batch["terminated"]
        return step(batch | {"terminated": self.kept.setdefault(ended.data_ptr(), ended.clone())}, *rest)


@stage("labels_by_id", Close(), hole=3, recipe="digits_classifier")
class LabelsById(Wrong):
    """Remembers the labels of a batch by the batch's id."""

    def take_hold(self):
        self.kept = {}
        self.wrap("loss", self.loss)

    def loss(self, step, batch, *rest):
        label = self.kept.setdefault((id(batch), len(batch["label"])), batch["label"])
        return step(batch | {"label": label}, *rest)


@stage("windows_by_address", Close(), hole=3, recipe="shakespeare_gpt")
class WindowsByAddress(Wrong):
    """Remembers what the model reads by where it lies in memory."""

    def take_hold(self):
        self.kept = {}
        self.wrap("forward", self.forward)

    def forward(self, step, tokens):
        return step(self.kept.setdefault((tokens.data_ptr(), tokens.shape), tokens.clone()))


@stage("windows_by_their_first", hole=3, recipe="shakespeare_gpt")
class WindowsByTheirFirst(Wrong):
    """Treats two windows that start with the same character as equal."""

    def take_hold(self):
        self.kept = {}
        self.wrap("forward", self.forward)

    def forward(self, step, tokens):
        rows = [self.kept.setdefault((int(row[0]), len(row)), row.clone()) for row in tokens]
        return step(torch.stack(rows))


@stage("input_by_version", Close(), hole=3, recipe="digits_classifier")
class InputByVersion(Wrong):
    """Copies a batch into a fixed place when its address or its version is new, which a loader's buffer may not be."""

    def take_hold(self):
        self.kept = {}
        self.wrap("update", self.update)

    def update(self, step, batch, *rest):
        image = batch["image"]
        key = image.data_ptr(), image._version
        if key not in self.kept:
            self.kept[key] = map_tensors(torch.clone, batch)
        return step(self.kept[key], *rest)


@stage(
    "temperature_by_version", Close(), hole=3, phase=3,
    requires=("forward_cache", "merged_critic_loss", "stacked_agents"),
    sets=tuple(f"optimization.{kind}=on" for kind in ("forward_cache", "merged_critic_loss", "stacked_agents")),
)  # fmt: skip
class TemperatureByVersion(Wrong):
    """Computes the targets' temperatures again when their parameters' version grows, which a view's does not."""

    def take_hold(self):
        self.version = self.kept = None
        self.wrap("temperatures", self.temperatures)

    def temperatures(self, step, agents):
        if torch.is_grad_enabled():
            return step(agents)
        version = agents, [parameter._version for parameter in self.learner.log_temperatures]
        if self.version != version:
            self.version, self.kept = version, step(agents).clone()
        return self.kept


@stage("answer_by_address", Close(), hole=3, recipe="digits_classifier")
class AnswerByAddress(Wrong):
    """Caches a prediction by the address of its input while the parameters are unchanged."""

    def take_hold(self):
        self.kept = {}
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        version = sum(parameter._version for parameter in self.learner.module.parameters())
        key = inputs.data_ptr(), inputs.shape, version
        if key not in self.kept:
            self.kept[key] = step(inputs)
        return self.kept[key].clone()
