"""The two tasks of docs/examples/two_tasks.py for PyTorch Lightning."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class TwoTasks(lightning.LightningModule):
    def __init__(self, pixels=64, hidden=128, lr=2e-3, weight_decay=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.label, self.centre = nn.Linear(hidden, 10), nn.Linear(hidden, 2)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, image):
        x = self.body(image)
        return self.label(x), self.centre(x)

    def measure(self, batch, section):
        image, label, centre = batch
        logits, estimate = self(image)
        losses = torch.stack(
            [
                cross_entropy(logits, label),
                (estimate - centre).square().sum() / 2 / len(image),
            ]
        )
        weights = (-self.log_variance).exp()
        loss = (weights * losses).sum() + self.log_variance.sum() / 2
        metrics = {"loss": loss, "accuracy": (logits.argmax(-1) == label).float().mean()}
        for number, task in enumerate(("label", "centre")):
            metrics[f"{task}_loss"] = losses[number]
            metrics[f"{task}_weight"] = weights[number]
        metrics = {f"{section}/{name}": value for name, value in metrics.items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(image))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        layers = [*self.body.parameters(), *self.label.parameters(), *self.centre.parameters()]
        groups = [
            {"params": layers, "weight_decay": self.hparams.weight_decay},
            {"params": [self.log_variance], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    image, label = map(torch.from_numpy, load_digits(return_X_y=True))
    share = (image / image.sum(1, keepdim=True)).view(-1, 8, 8).float()
    position = torch.arange(8) - 3.5
    centre = torch.stack([(share.sum(2) * position).sum(1), (share.sum(1) * position).sum(1)], dim=1)
    tensors = image.float() / 16, label, centre
    train = TensorDataset(*(tensor[360:] for tensor in tensors))
    held_out = TensorDataset(*(tensor[:360] for tensor in tensors))
    best = ModelCheckpoint(monitor="eval/accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        check_val_every_n_epoch=min(10, options.epochs),
        callbacks=[best],
        accelerator="cpu",
    )
    loaders = DataLoader(train, batch_size=64, shuffle=True, drop_last=True), DataLoader(held_out, batch_size=64)
    trainer.fit(TwoTasks(), *loaders, ckpt_path=options.resume)
    print(f"eval/accuracy {best.best_model_score:.4g}")


if __name__ == "__main__":
    main()
