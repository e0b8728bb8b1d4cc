"""Models of graphs, experts, spectra."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional

from zoo.model import Model


class MessagePassing(Model):
    """A graph network: messages along edges are added up where they arrive. Graphs differ in their number of edges."""

    optimizer = partial(optim.Adam, lr=1e-2)
    own = ("dense adjacency", "sparse product", "scatter_add", "edges in another order")

    @staticmethod
    def batch(draw):
        edges = int(torch.randint(20, 40, (1,), generator=draw))
        x, y = torch.randn(12, 5, generator=draw), torch.randn(12, 1, generator=draw)
        return {"x": x, "y": y, "edges": torch.randint(12, (2, edges), generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.one, self.two = nn.Linear(5, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def arrive(self, x, edges):
        start, end = edges
        if "dense adjacency" in self.way:
            return x.new_zeros(12, 12).index_put((end, start), x.new_ones(len(end)), accumulate=True) @ x
        if "sparse product" in self.way:
            ones = x.new_ones(len(end))
            return torch.sparse.mm(torch.sparse_coo_tensor(edges.flip(0), ones, (12, 12), check_invariants=False), x)
        if "scatter_add" in self.way:
            return torch.zeros_like(x).scatter_add(0, end[:, None].expand(-1, x.shape[1]), x[start])
        if "edges in another order" in self.way:
            start, end = start.flip(0), end.flip(0)
        return torch.zeros_like(x).index_add(0, end, x[start])

    def forward(self, batch):
        x = self.one(batch["x"]).relu()
        x = x + self.two(self.arrive(x, batch["edges"])).relu()
        return functional.mse_loss(self.head(self.arrive(x, batch["edges"])), batch["y"])


class Experts(Model):
    """Each row goes to the best of four experts, and the gate's shares are balanced."""

    optimizer = partial(optim.AdamW, lr=1e-2)
    own = ("all experts on all rows", "stacked experts", "rows in expert's order")

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(32, 6, generator=draw), "y": torch.randn(32, 3, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)) for _ in range(4))

    def routed(self, x, chosen):
        if "all experts on all rows" in self.way:
            every = torch.stack([expert(x) for expert in self.experts], 1)
            return every[torch.arange(len(x)), chosen]
        if "stacked experts" in self.way:
            hidden = x.expand(4, -1, -1)
            for layer in (0, 2):
                weight, bias = (torch.stack([getattr(e[layer], n) for e in self.experts]) for n in ("weight", "bias"))
                hidden = hidden @ weight.transpose(1, 2) + bias[:, None]
                hidden = functional.gelu(hidden) if layer == 0 else hidden
            return hidden[chosen, torch.arange(len(x))]
        if "rows in expert's order" in self.way:
            order = chosen.argsort(stable=True)
            parts = x[order].split(chosen.bincount(minlength=4).tolist())
            out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
            return out[order.argsort()]
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out

    def forward(self, batch):
        shares = self.gate(batch["x"]).softmax(1)
        share, chosen = shares.max(1)
        out = share[:, None] * self.routed(batch["x"], chosen)
        counts = functional.one_hot(chosen, 4).to(shares.dtype).mean(0)
        return functional.mse_loss(out, batch["y"]) + 0.01 * 4 * (counts * shares.mean(0)).sum()


class Spectral(Model):
    """Complex weights multiply the Fourier transform of a signal."""

    optimizer = partial(optim.Adam, lr=1e-2)
    own = ("real arithmetic", "multiplied and summed", "transform as a product")
    without = ("fused", "flat parameters", "flat gradients")  # for complex numbers there is no fused Adam
    rows = True

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(8, 3, 16, generator=draw), "y": torch.randn(8, 1, 16, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.lift, self.head = nn.Conv1d(3, 4, 1), nn.Conv1d(4, 1, 1)
        self.weight = nn.Parameter(0.3 * torch.randn(4, 4, 5, dtype=torch.cfloat))

    def forward(self, batch):
        x = self.lift(batch["x"])
        if "transform as a product" in self.way:
            angle = torch.arange(16, dtype=x.dtype)[:, None] * torch.arange(5, dtype=x.dtype) * (-2 * torch.pi / 16)
            spectrum = torch.complex(x @ angle.cos(), x @ angle.sin())
        else:
            spectrum = torch.fft.rfft(x)[..., :5]
        if "real arithmetic" in self.way:
            (a, b), (c, d) = (torch.view_as_real(each).unbind(-1) for each in (spectrum, self.weight))
            product = partial(torch.einsum, "bim,iom->bom")
            mixed = torch.complex(product(a, c) - product(b, d), product(a, d) + product(b, c))
        elif "multiplied and summed" in self.way:
            mixed = (spectrum[:, :, None] * self.weight).sum(1)
        else:
            mixed = torch.einsum("bim,iom->bom", spectrum, self.weight)
        x = functional.gelu(x + torch.fft.irfft(mixed, n=16))
        return functional.mse_loss(self.head(x), batch["y"])
