"""The variational autoencoder of docs/examples/vae.py for PyTorch Lightning."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class Vae(lightning.LightningModule):
    def __init__(self, pixels=64, hidden=128, latent=8, beta=1.0, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, image):
        mean, _ = self.encoder(image).chunk(2, dim=-1)
        return self.decoder(mean).sigmoid()

    def measure(self, batch, section):
        (image,) = batch
        mean, log_variance = self.encoder(image).chunk(2, dim=-1)
        latent = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        logits = self.decoder(latent)
        error = binary_cross_entropy_with_logits(logits, image, reduction="sum") / len(image)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2 / len(image)
        loss = error + self.hparams.beta * divergence
        metrics = {"loss": loss, "error": error, "divergence": divergence}
        metrics = {f"{section}/{name}": value for name, value in metrics.items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(image))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    image = torch.from_numpy(load_digits().data).float() / 16
    train = DataLoader(TensorDataset(image[360:]), batch_size=64, shuffle=True, drop_last=True)
    held_out = DataLoader(TensorDataset(image[:360]), batch_size=64)
    best = ModelCheckpoint(monitor="eval/loss", mode="min", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        check_val_every_n_epoch=min(10, options.epochs),
        callbacks=[best],
        accelerator="cpu",
    )
    trainer.fit(Vae(), train, held_out, ckpt_path=options.resume)
    print(f"eval/loss {best.best_model_score:.4g}")


if __name__ == "__main__":
    main()
