"""The small BERT of docs/examples/bert.py for PyTorch Lightning."""

import argparse
import math

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

MASK = 0
SUBJECTS = (("cat", "dog", "child", "robot"), ("cats", "dogs", "children", "robots"))
VERBS = (("sees", "likes", "follows"), ("see", "like", "follow"))
PLACES = ("here", "there", "outside")
WORDS = sorted({"the", "that", *SUBJECTS[0], *SUBJECTS[1], *VERBS[0], *VERBS[1], *PLACES})


class Bert(lightning.LightningModule):
    def __init__(self, length=10, words=20, width=64, heads=4, layers=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(length, width) / 50)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        blocks = [nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, word):
        x = self.words(word) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def measure(self, batch, section):
        (word,) = batch
        chance = torch.rand(word.shape, device=self.device)
        other = torch.randint(1, self.hparams.words, word.shape, device=self.device)
        predicted = chance < 0.15
        shown = torch.where(chance < 0.12, MASK, word)
        shown = torch.where((chance >= 0.12) & (chance < 0.135), other, shown)
        logits, target = self(shown)[predicted], word[predicted]
        loss = cross_entropy(logits, target)
        accuracy = (logits.argmax(-1) == target).float().mean()
        metrics = {f"{section}/loss": loss, f"{section}/accuracy": accuracy}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(target))
        return loss

    def training_step(self, batch, index):
        return self.measure(batch, "train")

    def validation_step(self, batch, index):
        self.measure(batch, "eval")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches

        def factor(update):
            if update < 0.1 * total:
                return max(0.01, update / (0.1 * total))
            return (1 + math.cos(math.pi * (update / total - 0.1) / 0.9)) / 2

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sentence(generator):
    first, second, third, *choices = torch.randint(2**20, (9,), generator=generator).tolist()
    nouns = [SUBJECTS[many % 2][choice % 4] for many, choice in zip((first, second, third), choices, strict=False)]
    verbs = [VERBS[many % 2][choice % 3] for many, choice in zip((second, first), choices[3:], strict=False)]
    words = ["the", nouns[0], "that", "the", nouns[1], *verbs, "the", nouns[2], PLACES[choices[5] % 3]]
    return [WORDS.index(word) + 1 for word in words]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    generator = torch.Generator().manual_seed(0)
    word = torch.tensor([sentence(generator) for _ in range(4096)])
    train = DataLoader(TensorDataset(word[512:]), batch_size=64, shuffle=True, drop_last=True)
    held_out = DataLoader(TensorDataset(word[:512]), batch_size=64)
    best = ModelCheckpoint(monitor="eval/accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        check_val_every_n_epoch=min(5, options.epochs),
        gradient_clip_val=1.0,
        callbacks=[best],
        accelerator="cpu",
    )
    trainer.fit(Bert(), train, held_out, ckpt_path=options.resume)
    print(f"eval/accuracy {best.best_model_score:.4g}")


if __name__ == "__main__":
    main()
