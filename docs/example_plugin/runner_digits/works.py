"""The learner and its dataset in torch."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from runner.api import Batch, Context, Learner, Source, State


class Mlp(Learner):
    """One hidden layer and softmax cross-entropy."""

    story = compilable = ("loss",)

    def __init__(self, config, shapes, context: Context) -> None:
        super().__init__(config, shapes, context)
        self.model = nn.Sequential(nn.Linear(*shapes["image"], config.hidden), nn.ReLU(), nn.Linear(config.hidden, 10))
        for parameter in self.model.to(self.device).parameters():
            nn.init.normal_(parameter, std=0.1, generator=context.generator("parameters"))
        self.lr = config.lr
        self.slots.define(forward=self.forward, loss=self.loss)

    def configure_optimizers(self) -> None:
        self.optimizer = self.slots.make_optimizer(list(self.model.parameters()), lr=self.lr)

    def update(self, batch: Batch, noise: Batch) -> Batch:
        self.optimizer.zero_grad()
        loss = self.slots.loss(batch)
        self.slots.backward(loss)
        self.slots.optimizer_step(self.optimizer)
        return {"loss": loss.detach()}

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.slots.forward(batch["image"]).float(), batch["label"])

    def forward(self, image: Tensor) -> Tensor:
        with self.slots.precision():
            return self.model(image)

    @torch.no_grad()
    def predict(self, observation: Tensor) -> Tensor:
        return self.slots.forward(observation)

    def named_parameters(self):
        return self.model.named_parameters()

    def state_dict(self) -> State:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Digits(Source):
    """The first images are held out, the others are drawn uniformly with replacement."""

    def __init__(self, config, context: Context) -> None:
        pixels, self.label = map(torch.from_numpy, load_digits(return_X_y=True))
        self.image = pixels.float() / 16
        self.shapes = {"image": (64,), "label": ()}
        self.held_out = config.held_out
        self.generator = context.generator("batches", "cpu")

    def sample(self, batch_size: int, progress: float) -> Batch:
        rows = torch.randint(self.held_out, len(self.label), (batch_size,), generator=self.generator)
        return {"image": self.image[rows], "label": self.label[rows]}

    def evaluate(self, learner: Learner) -> dict[str, float]:
        answer = learner.predict(self.image[: self.held_out].to(learner.device)).argmax(-1).cpu()
        return {"accuracy": (answer == self.label[: self.held_out]).float().mean().item()}

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None: ...
