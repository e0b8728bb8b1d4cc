"""The contrastive pre-training and the probe of docs/examples/contrastive.py for PyTorch Lightning."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize
from torch.utils.data import DataLoader, TensorDataset


def encoder():
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())


class Contrastive(lightning.LightningModule):
    def __init__(self, temperature=0.2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        projection = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
        self.net = nn.Sequential(encoder(), projection)

    def measure(self, batch, section):
        image, _ = batch
        views = []
        for _ in range(2):
            matrix = torch.eye(2, 3, device=self.device) + torch.randn(len(image), 2, 3, device=self.device) / 6
            grid = affine_grid(matrix, list(image.shape), align_corners=False)
            views.append(grid_sample(image, grid, align_corners=False))
        code = normalize(self.net(torch.cat(views)), dim=-1)
        likeness = code @ code.T / self.hparams.temperature
        likeness = likeness.masked_fill(torch.eye(len(code), dtype=torch.bool, device=self.device), -1e9)
        target = torch.arange(len(code), device=self.device).roll(len(code) // 2)
        loss = cross_entropy(likeness, target)
        recognized = (likeness.argmax(-1) == target).float().mean()
        metrics = {f"{section}/loss": loss, f"{section}/recognized": recognized}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(code))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Probe(lightning.LightningModule):
    def __init__(self, pretrained, lr=1e-2):
        super().__init__()
        self.encoder = encoder().requires_grad_(False)
        self.encoder.load_state_dict(pretrained.net[0].state_dict())
        self.head = nn.Linear(128, 10)
        self.lr = lr

    def measure(self, batch, section):
        image, label = batch
        logits = self.head(self.encoder(image))
        loss = cross_entropy(logits, label)
        accuracy = (logits.argmax(-1) == label).float().mean()
        metrics = {f"{section}/loss": loss, f"{section}/accuracy": accuracy}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(label))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        return torch.optim.Adam(self.head.parameters(), lr=self.lr)


def loaders(labelled, batch_size):
    image, label = map(torch.from_numpy, load_digits(return_X_y=True))
    image = image.float().view(-1, 1, 8, 8) / 16
    train = TensorDataset(image[360 : 360 + labelled], label[360 : 360 + labelled])
    held_out = TensorDataset(image[:360], label[:360])
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out, batch_size=batch_size),
    )


def fit(model, data, epochs, every, monitor, mode, resume=None):
    best = ModelCheckpoint(monitor=monitor, mode=mode, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        check_val_every_n_epoch=min(every, epochs),
        log_every_n_steps=2,
        callbacks=[best],
        accelerator="cpu",
    )
    trainer.fit(model, *data, ckpt_path=resume)
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--probe-epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    best = fit(Contrastive(), loaders(1437, 128), options.epochs, 10, "eval/loss", "min", options.resume)
    pretrained = Contrastive.load_from_checkpoint(best.best_model_path)
    probed = fit(Probe(pretrained), loaders(100, 50), options.probe_epochs, 100, "eval/accuracy", "max")
    print(f"eval/accuracy {probed.best_model_score:.4g}")


if __name__ == "__main__":
    main()
