"""One update of a graph transformer on molecules: ours, and PyTorch Geometric's ``GPSConv`` in a bare loop.

``pip install -e '.[reference]'``, then ``python experiments/peers/gps.py``. The shapes are those of the recipe
``gps_esol``; both have AdamW's fused kernel and clip gradients.
"""

from functools import partial

import torch
from session import Step, assembled, beside, draws, ours
from torch import Tensor, nn

RECIPE = "gps_esol"
OURS = {
    "ours: no stage": ("optimization.fused_optimizer=off", "optimization.heap_retention=off"),
    "ours: fused_optimizer": ("optimization.heap_retention=off",),
    "ours: the recipe": (),
    "ours: the recipe, in buckets": ("optimization.bucketing=on",),
    "ours: the recipe, compiled": ("optimization.compile=on",),
}
THEIRS = "PyTorch Geometric"


def theirs() -> Step:
    """The same network of their layers on the same molecules, with their batches: no atom is padding."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GINEConv, GPSConv, global_mean_pool

    pipeline = assembled(RECIPE)
    settings = pipeline.recipe.model
    width, features = settings.width, pipeline.source.shapes["x"][-1]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.kinds = nn.Linear(features, width), nn.Embedding(5, width)
            self.layers = nn.ModuleList(self.layer() for _ in range(settings.layers))
            self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

        def layer(self) -> nn.Module:
            local = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            layer = GPSConv(width, GINEConv(local, train_eps=True), settings.heads, norm=None)
            layer.norm1, layer.norm2, layer.norm3 = (nn.LayerNorm(width) for _ in range(3))  # its own take whole graphs
            layer.norm_with_batch = False
            return layer

        def forward(self, graphs: Batch) -> Tensor:
            x, kind = self.enter(graphs.x), self.kinds(graphs.bond)
            for layer in self.layers:
                x = layer(x, graphs.edge_index, graphs.batch, edge_attr=kind)
            number: Tensor = self.head(global_mean_pool(x, graphs.batch, graphs.num_graphs))
            return number.squeeze(-1)

    def converted(batch: dict[str, Tensor]) -> Batch:
        graphs = []
        columns = (batch[name] for name in ("x", "edge", "bond", "mask", "target"))
        for x, edge, bond, mask, target in zip(*columns, strict=True):
            real = bond > 0
            graphs.append(Data(x=x[mask.bool()], edge_index=edge[real].T.contiguous(), bond=bond[real], y=target[None]))
        return Batch.from_data_list(graphs)

    model = Network()
    own = sum(each.numel() for each in pipeline.learner.module.parameters())
    assert sum(each.numel() for each in model.parameters()) == own, "not the same model"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    drawn = draws(pipeline)
    pool = [converted(next(drawn).batch) for _ in range(8)]
    turn = iter(range(10**9))

    def update() -> None:
        graphs = pool[next(turn) % len(pool)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(graphs), graphs.y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


if __name__ == "__main__":
    builds = {name: partial(ours, RECIPE, *sets) for name, sets in OURS.items()}
    beside("gps", builds | {THEIRS: theirs}, THEIRS, __doc__)
