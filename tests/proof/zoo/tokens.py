"""Models of sequences: recurrent, attending, sparse, ragged."""

import math
from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.utils import rnn

from zoo.model import BACKWARD, Model


def words(draw, rows=6, length=8, count=11):
    return {"tokens": torch.randint(count, (rows, length + 1), generator=draw)}


class LongMemory(Model):
    """An LSTM that predicts the next token."""

    optimizer = partial(optim.Adam, lr=1e-2)
    own = ("cell in a loop", "state handed in", "one-hot embedding")
    without = ("func.grad",)  # the flattened weights of an LSTM are not those that a transform hands in
    rows = True
    batch = staticmethod(words)

    def __init__(self, way):
        super().__init__(way)
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, batch):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if "one-hot embedding" in self.way:
            x = functional.one_hot(tokens, 11).to(self.embed.weight.dtype) @ self.embed.weight
        else:
            x = self.embed(tokens)
        if "cell in a loop" in self.way:
            hidden = self.cells(x)
        elif "state handed in" in self.way:
            zeros = x.new_zeros(1, len(x), 8)
            hidden, _ = self.lstm(x, (zeros, zeros))
        else:
            hidden, _ = self.lstm(x)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    def cells(self, x):
        lstm, h, c, found = self.lstm, x.new_zeros(len(x), 8), x.new_zeros(len(x), 8), []
        for row in x.unbind(1):
            gates = row @ lstm.weight_ih_l0.t() + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.t() + lstm.bias_hh_l0
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 1)


class Ragged(Model):
    """A GRU over packed sequences of different lengths, in batches of different sizes."""

    optimizer = partial(optim.Adadelta, lr=1.0)
    own = ("padded and masked", "one sequence at a time")
    without = ("func.grad", "aot_eager")  # packing needs lengths as numbers

    @staticmethod
    def batch(draw):
        rows = int(torch.randint(3, 8, (1,), generator=draw))
        lengths = torch.randint(1, 7, (rows,), generator=draw).sort(descending=True).values
        return {"x": torch.randn(rows, 6, 4, generator=draw), "length": lengths, "y": torch.randn(rows, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, batch):
        x, lengths = batch["x"], batch["length"]
        if "padded and masked" in self.way:
            last = self.gru(x)[0][torch.arange(len(x)), lengths - 1]
        elif "one sequence at a time" in self.way:
            last = torch.cat(
                [self.gru(row[None, :length])[1][0] for row, length in zip(x, lengths.tolist(), strict=True)]
            )
        else:
            last = self.gru(rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]
        return functional.mse_loss(self.head(last)[:, 0], batch["y"])


class Attention(Model):
    """A block of a transformer with tied embeddings; the gradient of the keys' bias is zero but for rounding."""

    optimizer = partial(optim.AdamW, lr=1e-2, betas=(0.9, 0.95))
    own = ("written-out attention", "einsum attention", "one product for all", "written-out normalisation", "inductor")
    rows = True
    batch = staticmethod(words)

    def __init__(self, way):
        super().__init__(way)
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(8, 8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def normal(self, x, norm):
        if "written-out normalisation" not in self.way:
            return norm(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight + norm.bias

    def attend(self, x):
        if "one product for all" in self.way:
            weight, bias = (
                torch.cat([getattr(each, name) for each in (self.q, self.k, self.v)]) for name in ("weight", "bias")
            )
            projected = functional.linear(x, weight, bias).chunk(3, -1)
        else:
            projected = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in projected)
        if self.way & {"written-out attention", "einsum attention"}:
            by_einsum = "einsum attention" in self.way
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if by_einsum else q @ k.transpose(2, 3)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            shares = (scores / math.sqrt(4)).masked_fill(~mask, -math.inf).softmax(-1)
            mixed = torch.einsum("bhqk,bhkd->bhqd", shares, v) if by_einsum else shares @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def logits(self, batch):
        x = self.embed(batch["tokens"][:, :-1]) + self.place.weight
        x = x + self.attend(self.normal(x, self.norms[0]))
        x = x + self.mlp(self.normal(x, self.norms[1]))
        return x @ self.embed.weight.t()

    def forward(self, batch):
        return functional.cross_entropy(self.logits(batch).flatten(0, 1), batch["tokens"][:, 1:].flatten())


class Autocast(Model):
    """Mixed precision: products in bfloat16, everything else in float32."""

    optimizer = partial(optim.AdamW, lr=1e-2)
    own = ("in-place activations", "log-sum-exp", "autocast without a cache")
    without = ("func.grad",)
    rows = True

    @staticmethod
    def batch(draw):
        x = torch.randn(24, 6, generator=draw)
        return {"x": x, "y": torch.randint(5, (24,), generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.one, self.norm, self.two, self.head = (
            nn.Linear(6, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 5),
        )

    def forward(self, batch):
        cached = "autocast without a cache" not in self.way
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            in_place = "in-place activations" in self.way
            x = functional.relu(self.norm(functional.relu(self.one(batch["x"]), in_place)), in_place)
            x = self.head(functional.relu(self.two(x), in_place))
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if "log-sum-exp" in self.way:
            return (x.logsumexp(1) - x.gather(1, batch["y"][:, None])[:, 0]).mean()
        return functional.cross_entropy(x, batch["y"])


class AutocastDropped(Autocast):
    """Mixed precision with dropout, drawn inside the step."""

    own = ("in-place activations", "written-out mask")
    without = ("func.grad", "micro-batches", "other order of rows")
    rows = False

    def forward(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            x = functional.relu(self.norm(functional.relu(self.one(batch["x"]), "in-place activations" in self.way)))
            if "written-out mask" in self.way:
                x = x * torch.empty_like(x).bernoulli_(0.9).div_(0.9)
            else:
                x = functional.dropout(x, 0.1)
            x = self.head(functional.relu(self.two(x)))
        return functional.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), batch["y"])


class AutocastAttention(Attention):
    """A block of a transformer in mixed precision."""

    own = ("written-out attention", "einsum attention", "one product for all", "written-out normalisation")
    without = ("func.grad",)

    def logits(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            x = super().logits(batch)
        return x.to(torch.promote_types(x.dtype, torch.float32))


class SparseWords(Model):
    """An embedding with sparse gradients, by SparseAdam; the layer behind it does not learn."""

    optimizer = partial(optim.SparseAdam, lr=1e-2)
    own = ("rows by index", "coalesced first")
    without = (
        "rate in a tensor",
        *set(BACKWARD) - {"autograd.grad", "scaled loss"},
        "func.grad",
        "aot_eager",
        "micro-batches",
    )
    rows = True
    batch = staticmethod(words)

    def __init__(self, way):
        super().__init__(way)
        self.embed, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 11).requires_grad_(False)

    def trained(self):
        return {"optimizer": [self.embed.weight]}

    def forward(self, batch):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if "rows by index" in self.way:
            x = functional.embedding(tokens.flatten(), self.embed.weight, sparse=True)
        else:
            x = self.embed(tokens).flatten(0, 1)
        return functional.cross_entropy(self.head(x.tanh()), targets.flatten())

    def adjust(self, loop):
        if "coalesced first" in self.way:
            self.embed.weight.grad = self.embed.weight.grad.coalesce()


class Bags(Model):
    """Bags of words of different sizes, with sparse gradients."""

    own = ("dense gradients", "written-out mean", "bags of one size")
    without = ("flat gradients", "func.grad", "foreach", "fused", "aot_eager")

    @staticmethod
    def batch(draw):
        size = torch.randint(1, 5, (8,), generator=draw)
        tokens = torch.randint(13, (int(size.sum()),), generator=draw)
        return {"tokens": tokens, "size": size, "y": torch.randint(3, (8,), generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.bag, self.head = nn.EmbeddingBag(13, 6, mode="mean", sparse="dense gradients" not in way), nn.Linear(6, 3)

    def forward(self, batch):
        tokens, size = batch["tokens"], batch["size"]
        if "written-out mean" in self.way:
            row = torch.arange(len(size)).repeat_interleave(size)
            rows = functional.embedding(tokens, self.bag.weight, sparse=True)
            x = rows.new_zeros(len(size), 6).index_add(0, row, rows) / size[:, None]
        elif "bags of one size" in self.way:
            padded = rnn.pad_sequence(tokens.split(size.tolist()), batch_first=True)
            inside = torch.arange(padded.shape[1]) < size[:, None]
            rows = functional.embedding(padded, self.bag.weight, sparse=True) * inside[..., None]
            x = rows.sum(1) / size[:, None]
        else:
            x = self.bag(tokens, size.cumsum(0) - size)
        return functional.cross_entropy(self.head(x), batch["y"])


class Transcriber(Model):
    """Connectionist temporal classification, with sequences and targets of different lengths."""

    optimizer = partial(optim.Rprop, lr=1e-3)
    own = ("lengths as lists", "targets in one row", "written-out log-softmax")
    without = ("aot_eager", "func.grad")

    @staticmethod
    def batch(draw):
        x, lengths = torch.randn(10, 5, 4, generator=draw), torch.randint(8, 11, (5,), generator=draw)
        return {
            "x": x,
            "lengths": lengths,
            "targets": torch.randint(1, 6, (5, 4), generator=draw),
            "target_lengths": torch.randint(1, 4, (5,), generator=draw),
        }

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, batch):
        x, targets, lengths, target_lengths = (batch[k] for k in ("x", "targets", "lengths", "target_lengths"))
        x = self.body(x)
        logs = x - x.exp().sum(-1, keepdim=True).log() if "written-out log-softmax" in self.way else x.log_softmax(-1)
        if "targets in one row" in self.way:
            targets = torch.cat([row[:count] for row, count in zip(targets, target_lengths.tolist(), strict=True)])
        if "lengths as lists" in self.way:
            lengths, target_lengths = tuple(lengths.tolist()), tuple(target_lengths.tolist())
        return functional.ctc_loss(logs, targets, lengths, target_lengths)
