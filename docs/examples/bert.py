"""A small BERT (Devlin et al. 2019): a transformer that predicts masked words of synthetic sentences."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss, Mean, Objective

MASK = 0
SUBJECTS = (("cat", "dog", "child", "robot"), ("cats", "dogs", "children", "robots"))
VERBS = (("sees", "likes", "follows"), ("see", "like", "follow"))
PLACES = ("here", "there", "outside")
WORDS = sorted({"the", "that", *SUBJECTS[0], *SUBJECTS[1], *VERBS[0], *VERBS[1], *PLACES})


class BertConfig(GradientLearnerConfig):
    """A bidirectional transformer; 15 % of the words are masked, replaced or only predicted."""

    kind, learns_from = "example_bert", "example_sentences"
    implementation = "Bert"
    objective = Objective("accuracy", "maximize", margin=0.01, unit="share")
    width: int = 64
    heads: int = 4
    layers: int = 2


class Encoder(nn.Module):
    def __init__(self, length, words, config):
        super().__init__()
        self.words = nn.Embedding(words, config.width)
        self.positions = nn.Parameter(torch.randn(length, config.width) / 50)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        blocks = [
            nn.TransformerEncoderLayer(config.width, config.heads, 4 * config.width, **options)
            for _ in range(config.layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, words)

    def forward(self, word):
        x = self.words(word) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bert(GradientLearner):
    def build(self, config, shapes, context):
        self.vocabulary = context.sizes["vocabulary"]
        return Encoder(*shapes["word"], self.vocabulary, config)

    def noise(self, batch, generator):
        size = batch["word"].shape
        chance = torch.rand(size, generator=generator, device=self.device)
        word = torch.randint(1, self.vocabulary, size, generator=generator, device=self.device)
        return {"chance": chance, "word": word}

    def loss(self, batch, noise, progress):
        word, chance = batch["word"], noise["chance"]
        predicted = chance < 0.15
        shown = torch.where(chance < 0.12, MASK, word)  # 80 % of the predicted words
        shown = torch.where((chance >= 0.12) & (chance < 0.135), noise["word"], shown)  # 10 % of them
        logits, target = self.slots.forward(shown)[predicted], word[predicted]
        correct = (logits.detach().argmax(-1) == target).sum()
        total = cross_entropy(logits, target, reduction="sum")
        return Loss(total, predicted.sum(), {"accuracy": Mean(correct, predicted.sum())})


class SentencesConfig(DatasetConfig):
    """Sentences of a small grammar, in which subjects and verbs agree in number."""

    kind, provides, in_memory = "example_synthetic_sentences", "example_sentences", True
    implementation = "Sentences"
    headline = ("accuracy", "loss")
    sentences: int = 4096


class Sentences(DatasetSource):
    sizes = {"vocabulary": len(WORDS) + 1}

    def datasets(self, config):
        generator = torch.Generator().manual_seed(0)
        word = torch.tensor([self.sentence(generator) for _ in range(config.sentences)])
        return {"word": word[512:]}, {"word": word[:512]}

    def sentence(self, generator):
        """Returns, for example, the numbers of: the cat that the dogs follow sees the robots there."""
        first, second, third, *choices = torch.randint(2**20, (9,), generator=generator).tolist()
        nouns = [SUBJECTS[many % 2][choice % 4] for many, choice in zip((first, second, third), choices, strict=False)]
        verbs = [VERBS[many % 2][choice % 3] for many, choice in zip((second, first), choices[3:], strict=False)]
        place = PLACES[choices[5] % 3]
        words = ["the", nouns[0], "that", "the", nouns[1], *verbs, "the", nouns[2], place]
        return [WORDS.index(word) + 1 for word in words]
