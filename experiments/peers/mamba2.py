"""One update of a language model with Mamba-2: ours by every scan, and the model of the library transformers.

``pip install -e '.[reference]'``, then ``python experiments/peers/mamba2.py``. The shapes are those of the recipe
``mamba2_shakespeare``; all have AdamW's fused kernel and clip gradients.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from session import keep, take_turns
from torch import nn

from runner.measure.measured import Measured
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.train.assemble import assemble

OURS = {
    "ours: the recurrence": ("optimization.chunked_scan=off",),
    "ours: in chunks": (),
    "ours: in chunks, compiled": ("optimization.compile=on",),
    "ours: as a parallel scan": ("optimization.chunked_scan=off", "optimization.associative_scan=on"),
}
THEIRS = "transformers"


def ours(sets: tuple[str, ...]) -> Callable[[], object]:
    """An update of the recipe."""
    measured = Measured(assemble(load("mamba2_shakespeare", ["device=cpu", *sets], Registry()), []))
    pool, turn = measured.pool(), iter(range(10**9))
    return lambda: measured.step.update(pool[next(turn) % len(pool)])


def theirs() -> Callable[[], object]:
    """The same model in a bare loop, on the same windows, with its own path for processors without a GPU."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    pipeline = assemble(load("mamba2_shakespeare", ["device=cpu"], Registry()), [])
    settings = pipeline.recipe.model
    chunk = pipeline.recipe.stages["chunked_scan"].chunk
    model = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=pipeline.source.sizes["vocabulary"], hidden_size=settings.width, expand=settings.expand,
            num_hidden_layers=settings.layers, state_size=settings.state, head_dim=settings.head_width,
            num_heads=settings.expand * settings.width // settings.head_width, conv_kernel=settings.taps, n_groups=1,
            chunk_size=chunk, tie_word_embeddings=True, use_cache=False, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    own = sum(each.numel() for each in pipeline.learner.module.parameters())
    assert sum(each.numel() for each in model.parameters()) == own, "not the same model"
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    pool, turn = Measured(pipeline).pool(), iter(range(10**9))

    def update() -> None:
        tokens = pool[next(turn) % len(pool)].batch["tokens"]
        logits = model(tokens[:, :-1]).logits
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    builds = {name: partial(ours, sets) for name, sets in OURS.items()} | {THEIRS: theirs}
    figures = take_turns(builds, THEIRS, arguments.rounds, 1.0)
    for name, each in figures.items():
        low, high = each["ci95"]
        print(f"{name:26} {each['ms']:7.1f} ms   {each['ratio']:.2f} [{low:.2f}, {high:.2f}]", flush=True)
    keep("mamba2", f"python experiments/peers/mamba2.py --rounds {arguments.rounds}", figures)


if __name__ == "__main__":
    main()
