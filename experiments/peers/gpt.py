"""One update of a small GPT: ours, the architecture of nanoGPT in a bare loop, and the same in Lightning.

``pip install -e '.[bench]'``, then ``python experiments/peers/gpt.py``. The shapes are those of the recipe
``shakespeare_gpt``; all decay matrices alone and clip gradients; what says nothing else has
AdamW's fused kernel.
"""

import tempfile
import threading
import warnings
from collections.abc import Iterator
from functools import partial

import torch
from session import Step, assembled, beside, draws, ours
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

RECIPE = "shakespeare_gpt"
OURS = {
    "ours: no stage": ("optimization.amp=off", "optimization.fused_optimizer=off"),
    "ours: fused_optimizer": ("optimization.amp=off",),
    "ours: fused_optimizer, heap_retention": ("optimization.amp=off", "optimization.heap_retention=on"),
    "ours: the recipe (with amp)": (),
    "ours: the recipe, heap, compiled": ("optimization.heap_retention=on", "optimization.compile=on"),
}
BARE = "nanoGPT's model, bare loop"


class Block(nn.Module):
    """Attention and a feed-forward layer with GELU, each after a layer norm without bias, as ``bias=False`` there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        out: Tensor = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return out


class Model(nn.Module):
    """The loss of the next symbol; the last layer is the embedding."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens[:, :-1]) + self.wpe(torch.arange(tokens.shape[1] - 1))
        logits = self.head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def theirs() -> tuple[Model, Iterator[Tensor]]:
    """The model with the shapes of the recipe, and the recipe's batches."""
    pipeline = assembled(RECIPE)
    settings, source = pipeline.recipe.model, pipeline.source
    context = pipeline.recipe.data.context
    model = Model(source.sizes["vocabulary"], context, settings.layers, settings.width, settings.heads)
    return model, (drawn.batch["tokens"] for drawn in draws(pipeline))


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """As nanoGPT sets it up: matrices decay, the others do not."""
    groups = [
        {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), fused=fused)


def bare(dtype: torch.dtype) -> Step:
    """Nothing but the training."""
    model, batches = theirs()
    optimizer = adamw(model)

    def update() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def lightning(precision: str) -> Step:
    """Lightning's loop, which logs nothing, shows nothing and saves nothing; a thread has it wait for its turn."""
    import lightning as library

    warnings.simplefilter("ignore")
    model, batches = theirs()
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Batches(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return batches

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_batch_start(self, *arguments: object) -> None:
            go.acquire()

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(tokens)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self, fused=precision == "32-true")  # with autocast it refuses to clip beside a fused one

        def on_train_batch_end(self, *arguments: object) -> None:
            done.release()

    trainer = library.Trainer(
        accelerator="cpu", precision=precision, max_steps=10**9, barebones=True, gradient_clip_val=1.0,
        default_root_dir=tempfile.mkdtemp(prefix="lightning-"),
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
    threading.Thread(target=trainer.fit, args=(Module(), loader), daemon=True).start()

    def update() -> None:
        go.release()
        done.acquire()

    return update


if __name__ == "__main__":
    builds = {name: partial(ours, RECIPE, *sets) for name, sets in OURS.items()}
    builds |= {BARE: partial(bare, torch.float32), f"{BARE}, bf16": partial(bare, torch.bfloat16)}
    builds |= {"Lightning": partial(lightning, "32-true"), "Lightning, bf16": partial(lightning, "bf16-mixed")}
    beside("gpt", builds, BARE, __doc__)
