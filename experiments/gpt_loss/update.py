"""One update of a GPT with a large vocabulary, in three variants.

A plain loop, and the product with its loss outside and inside of compiled code. Every figure comes
from several processes, which run in the order A B C C B A.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

VARIANTS = ("plain", "outside", "inside")
LABELS = {
    "plain": "plain loop, loss inside of `torch.compile`",
    "outside": "product, loss outside of compiled code",
    "inside": "product, loss inside of compiled code",
}
WARM_UP = 5


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after this block, [B, T, width]."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean cross-entropy of windows, [B, T + 1]."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain(args: argparse.Namespace) -> Callable[[], Any]:
    """Returns an update of the plain loop."""
    model = Plain(args).to(args.device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss = torch.compile(model)
    tokens = torch.from_numpy(random_tokens(args).astype(np.int64)).to(args.device)
    offsets = torch.arange(args.context + 1, device=args.device)

    def update() -> Tensor:
        start = torch.randint(len(tokens) - args.context, (args.batch, 1), device=args.device)
        optimizer.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            value = loss(tokens[start + offsets])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    return update


def product(args: argparse.Namespace, compilable: tuple[str, ...]) -> Callable[[], Any]:
    """Returns an update of the product, with a training's guard against numbers that are not finite."""
    from runner.plugin.registry import Registry
    from runner.plugins.sequences.gpt import Gpt
    from runner.recipe.loader import load
    from runner.training.guards import FiniteGuard
    from runner.training.pipeline import assemble
    from runner.training.step import Step

    Gpt.compilable = compilable
    folder = Path(tempfile.mkdtemp())
    overrides = [
        f"model={{layers: {args.layers}, width: {args.width}, heads: {args.heads}}}",
        *data_settings(args, folder),
        f"train.batch_size={args.batch}",
        f"optimization.amp={'{dtype: bf16}' if args.bf16 else 'off'}",
        "optimization.compile=on",
        f"device={args.device}",
    ]
    pipeline = assemble(load("shakespeare_gpt", overrides, Registry()))
    assert pipeline.source.sizes["vocabulary"] == args.vocabulary
    FiniteGuard(pipeline.slots, pipeline.learner, folder)
    return Step(pipeline)


def data_settings(args: argparse.Namespace, folder: Path) -> list[str]:
    """Writes a file of random tokens, and returns the settings of its source."""
    path = folder / "tokens.bin"
    random_tokens(args).tofile(path)
    description = {"tokenizer": "random", "vocabulary": args.vocabulary, "dtype": "uint16"}
    path.with_name("tokens.bin.json").write_text(json.dumps(description), encoding="utf-8")
    return [f"data={{kind: tokens, file: {path}, context: {args.context}, stride: 1}}"]


def random_tokens(args: argparse.Namespace) -> np.ndarray:
    """Returns random tokens, which cost as much as those of a text."""
    return np.random.default_rng(0).integers(0, args.vocabulary, 2**18, dtype=np.uint16)


def worker(args: argparse.Namespace) -> None:
    """Prints the time and memory of one variant."""
    torch.manual_seed(0)
    builds = {
        "plain": lambda: plain(args),
        "outside": lambda: product(args, ("forward",)),
        "inside": lambda: product(args, ("forward", "loss")),
    }
    update = builds[args.variant]()
    started = time.perf_counter()
    for _ in range(WARM_UP):
        update()
    synchronize(args)
    warm = time.perf_counter() - started
    reset_peak(args)
    # Other programs may use the processor meanwhile, but not its time for this process.
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    seconds = []
    for _ in range(args.updates):
        started = clock()
        update()
        synchronize(args)
        seconds.append(clock() - started)
    print(json.dumps({"ms": 1e3 * statistics.median(seconds), "peak_mib": peak(args), "warm_up_s": warm}))


def synchronize(args: argparse.Namespace) -> None:
    """Waits for the device."""
    if args.device == "cuda":
        torch.cuda.synchronize()


def reset_peak(args: argparse.Namespace) -> None:
    """Forgets the peak memory of the compilation."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(args: argparse.Namespace) -> float:
    """Returns the peak memory in MiB: of the device, or the resident memory of this process."""
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all variants in separate processes and returns their figures."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(args.rounds):
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        for variant in order:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[variant].append(json.loads(output.splitlines()[-1]))
            print(variant, runs[variant][-1], file=sys.stderr)
    return {"settings": {**vars(args), "out": None, "torch": torch.__version__}, "runs": runs}


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Returns the table of the README."""
    lines = [
        "| | ms | time relative to plain | peak MiB | relative to plain |",
        "|---|---|---|---|---|",
    ]
    for variant, label in LABELS.items():
        columns = []
        for key in ("ms", "peak_mib"):
            values = [run[key] for run in runs[variant]]
            pairs = zip(values, runs["plain"], strict=True)
            ratios = [value / other[key] for value, other in pairs]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            columns += [f"{statistics.median(values):.1f}", spread]
        lines.append(f"| {label} | {' | '.join(columns)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Returns the settings of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 4, "vocabulary": 50_304}
    for name, default in (sizes | {"updates": 20, "rounds": 8}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    if args.variant:
        worker(args)
    else:
        results = measure(args)
        print(table(results["runs"]))
        if args.out:
            args.out.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
