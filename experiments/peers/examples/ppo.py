"""The proximal policy optimization of docs/examples/ppo.py for PyTorch Lightning."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

LIMIT = 200  # steps of an episode


def starts(count, generator):
    return torch.cat([torch.rand(count, 4, generator=generator) / 10 - 0.05, torch.zeros(count, 1)], dim=1)


def step(state, action):
    _, speed, angle, turn, _ = state.unbind(1)
    push = (20 * action - 10 + 0.05 * turn.square() * angle.sin()) / 1.1
    turn_change = (9.8 * angle.sin() - angle.cos() * push) / (2 / 3 - 0.05 * angle.cos().square() / 1.1)
    push -= 0.05 * turn_change * angle.cos() / 1.1
    change = torch.stack([speed, push, turn, turn_change, torch.full_like(turn, 50)], dim=1)
    state = state + 0.02 * change
    return state, (state[:, [0, 2, 4]].abs() > torch.tensor([2.4, 0.21, LIMIT - 0.5])).any(1)


class Carts(IterableDataset):
    """Batches of what the present policy does."""

    def __init__(self, predict, generator, envs, steps):
        self.predict = predict
        self.generator = generator
        self.steps = steps
        self.state = starts(envs, generator)

    def __iter__(self):
        while True:
            yield self.collect()

    def collect(self):
        steps = []
        for _ in range(self.steps):
            output, observation = self.predict(self.state[:, :4]), self.state[:, :4]
            log_probs = output[:, :2].log_softmax(1)
            action = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
            state, over = step(self.state, action[:, 0])
            self.state = torch.where(over[:, None], starts(len(over), self.generator), state)
            steps.append((observation, action[:, 0], log_probs.gather(1, action)[:, 0], output[:, 2], ~over))
        observation, action, log_prob, value, continues = map(torch.stack, zip(*steps, strict=True))
        following, advantage = self.predict(self.state[:, :4])[:, 2], torch.zeros_like(value)
        later = torch.zeros_like(following)
        for number in reversed(range(len(value))):
            later = 1 + continues[number] * (0.99 * following + 0.94 * later) - value[number]
            following, advantage[number] = value[number], later
        batch = {"observation": observation, "action": action, "log_prob": log_prob, "return": advantage + value}
        batch["advantage"] = (advantage - advantage.mean()) / advantage.std()
        return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


class Ppo(lightning.LightningModule):
    def __init__(self, hidden=64, passes=4, clip=0.2, lr=3e-3, seed=1, envs=16, batch_size=1024):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        self.carts = Carts(self.predict, self.generator, envs, batch_size // envs)

    @torch.no_grad()
    def predict(self, observation):
        return self.net(observation.to(self.device)).cpu()

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        size = len(batch["action"])
        for _ in range(self.hparams.passes):
            for index in torch.randperm(size, generator=self.generator).reshape(4, -1):
                rows = {name: tensor[index] for name, tensor in batch.items()}
                output = self.net(rows["observation"])
                policy = Categorical(logits=output[:, :2])
                ratio = (policy.log_prob(rows["action"]) - rows["log_prob"]).exp()
                clipped = ratio.clamp(1 - self.hparams.clip, 1 + self.hparams.clip)
                gain = torch.minimum(ratio * rows["advantage"], clipped * rows["advantage"]).mean()
                error = (output[:, 2] - rows["return"]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(0.01 * error - gain - 0.01 * policy.entropy().mean())
                self.clip_gradients(optimizer, gradient_clip_val=0.5)
                optimizer.step()
        self.log_dict({"train/value_error": error, "train/gain": gain})

    def validation_step(self, batch, index):
        state, running = starts(32, torch.Generator().manual_seed(0)), torch.ones(LIMIT, 32)
        for number in range(1, LIMIT):
            state, over = step(state, self.predict(state[:, :4])[:, :2].argmax(1))
            running[number] = running[number - 1] * ~over
        self.log("eval/return", running.sum(0).mean(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["carts"] = {"state": self.carts.state, "generator": self.generator.get_state()}

    def on_load_checkpoint(self, checkpoint):
        self.carts.state = checkpoint["carts"]["state"]
        self.generator.set_state(checkpoint["carts"]["generator"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    model = Ppo(seed=options.seed)
    best = ModelCheckpoint(monitor="eval/return", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=-1,
        max_steps=16 * options.updates,
        limit_train_batches=min(10, options.updates),
        callbacks=[best],
        accelerator="cpu",
        num_sanity_val_steps=0,
        log_every_n_steps=5,
    )
    train = DataLoader(model.carts, batch_size=None)
    trainer.fit(model, train, DataLoader([0]), ckpt_path=options.resume)
    print(f"eval/return {best.best_model_score:.4g}")


if __name__ == "__main__":
    main()
