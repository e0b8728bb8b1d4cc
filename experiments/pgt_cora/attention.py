"""How long attention of either kind takes forward and backward, by the number of nodes.

python experiments/pgt_cora/attention.py
"""

from time import perf_counter

import torch

from runner.plugins.graphs.attention import Attention

NODES = (256, 512, 1024, 2048, 4096)
REPEATS = 5


def seconds(kind: str, nodes: int) -> float:
    """The fastest of several passes over one graph of so many nodes."""
    layer, x = Attention(128, 4, kind), torch.randn(1, nodes, 128, requires_grad=True)
    mask = torch.ones(1, nodes, dtype=torch.bool)
    times = []
    for _ in range(REPEATS):
        begun = perf_counter()
        layer(x, mask).sum().backward()
        times.append(perf_counter() - begun)
    return min(times)


def main() -> None:
    """Prints a table."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), width 128, 4 heads; milliseconds")
    print(f"{'nodes':>6} {'softmax':>9} {'linear':>9}")
    found = {(kind, nodes): seconds(kind, nodes) for nodes in NODES for kind in ("softmax", "linear")}
    for nodes in NODES:
        print(f"{nodes:>6} {found['softmax', nodes] * 1e3:>9.2f} {found['linear', nodes] * 1e3:>9.2f}")
    for kind in ("softmax", "linear"):
        print(f"{kind}: 4,096 nodes take {found[kind, 4096] / found[kind, 1024]:.1f} times as long as 1,024")


if __name__ == "__main__":
    main()
