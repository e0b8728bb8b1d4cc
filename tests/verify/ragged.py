"""Texts of different lengths, one after the other in a single tensor: no entry can be cut by rows of samples."""

import torch
from torch import nn
from torch.utils.data import Dataset

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss


class TextsConfig(DatasetConfig):
    """Texts whose label is whether they have more than three words."""

    kind, provides, shapes_vary = "ragged_texts", "ragged", True
    implementation = "Texts"


class Words(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 7, (count,), generator=generator).tolist()
        self.words = [torch.randint(20, (length,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.words[index], int(self.lengths[index] > 3)


class Texts(DatasetSource):
    def datasets(self, config):
        return Words(64, 1), Words(21, 2)

    def collate(self, samples):
        words, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(text) for text in words])
        starts = lengths.cumsum(0) - lengths
        return {"starts": starts, "words": torch.cat(words), "label": torch.tensor(labels)}


class BagConfig(GradientLearnerConfig):
    """The mean of embedded words."""

    kind, learns_from = "ragged_bag", "ragged"
    implementation = "Bag"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, words, starts):
        return self.head(self.embedding(words, starts))


class Bag(GradientLearner):
    def build(self, config, shapes, context):
        return Classifier()

    def loss(self, batch, noise, progress):
        logits = self.slots.forward(batch["words"], batch["starts"])
        return Loss(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))

    def inputs(self, batch):
        return batch["words"], batch["starts"]

    def predict(self, inputs):
        return self.slots.forward(*inputs)
