"""Regression or classification of the rows of a CSV file, as docs/examples/table.py, for PyTorch Lightning."""

import argparse
import csv
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

FILE = Path(__file__).parents[3] / "docs" / "examples" / "synthetic_flats.csv"


class TableNet(lightning.LightningModule):
    def __init__(self, inputs, classes, scale, hidden=64, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, max(1, classes)))

    def forward(self, x):
        return self.net(x)

    def measure(self, batch, section):
        x, target = batch
        output = self(x)
        if self.hparams.classes:
            loss = cross_entropy(output, target)
            metrics = {"accuracy": (output.argmax(-1) == target).float().mean()}
        else:
            error = output[:, 0] - target
            loss = error.square().mean()
            metrics = {"absolute_error": error.abs().mean() * self.hparams.scale}
        metrics = {f"{section}/{name}": value for name, value in {"loss": loss, **metrics}.items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Table(lightning.LightningDataModule):
    def __init__(self, file, target, batch_size=32):
        super().__init__()
        self.batch_size = batch_size
        with file.open(newline="") as text:
            rows = list(csv.DictReader(text))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if target not in columns:
            raise SystemExit(f"no column '{target}'; {file.name} has: {', '.join(columns)}")
        held_out = torch.arange(len(rows)) % 5 == 0
        target = self.numbers(columns.pop(target))
        self.scale, self.classes = 1.0, 0
        if target.is_floating_point():
            self.scale = target[~held_out].std().item()
            target = (target - target[~held_out].mean()) / self.scale
        else:
            self.classes = int(target.max()) + 1
        x = torch.cat([self.features(values, ~held_out) for values in columns.values()], dim=1)
        self.inputs = x.shape[1]
        self.train = TensorDataset(x[~held_out], target[~held_out])
        self.held_out = TensorDataset(x[held_out], target[held_out])

    def numbers(self, values):
        try:
            return torch.tensor([float(value) for value in values])
        except ValueError:
            classes = sorted(set(values))
            return torch.tensor([classes.index(value) for value in values])

    def features(self, values, train):
        column = self.numbers(values)
        if column.is_floating_point():
            return ((column - column[train].mean()) / column[train].std().clamp(min=1e-6))[:, None]
        return nn.functional.one_hot(column).float()

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.batch_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--target", default="rent")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    table = Table(options.file, options.target)
    best = ModelCheckpoint(monitor="eval/loss", mode="min", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        check_val_every_n_epoch=min(10, options.epochs),
        log_every_n_steps=10,
        callbacks=[best],
        accelerator="cpu",
    )
    trainer.fit(TableNet(table.inputs, table.classes, table.scale), table, ckpt_path=options.resume)
    print(f"eval/loss {best.best_model_score:.4g}")


if __name__ == "__main__":
    main()
