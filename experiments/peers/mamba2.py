"""One update of a language model with Mamba-2: ours by every scan, and the model of the library transformers.

``pip install -e '.[reference]'``, then ``python experiments/peers/mamba2.py``. The shapes are those of the recipe
``mamba2_shakespeare``; all have AdamW's fused kernel and clip gradients.
"""

from functools import partial

import torch
from session import Step, assembled, beside, draws, ours
from torch import nn

RECIPE = "mamba2_shakespeare"
OURS = {
    "ours: the recurrence": ("optimization.chunked_scan=off",),
    "ours: in chunks": (),
    "ours: in chunks, compiled": ("optimization.compile=on",),
    "ours: as a parallel scan": ("optimization.chunked_scan=off", "optimization.associative_scan=on"),
}
THEIRS = "transformers"


def theirs() -> Step:
    """The same model in a bare loop, on the same windows, with its own path for processors without a GPU."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    pipeline = assembled(RECIPE)
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
    drawn = draws(pipeline)

    def update() -> None:
        tokens = next(drawn).batch["tokens"]
        logits = model(tokens[:, :-1]).logits
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


if __name__ == "__main__":
    builds = {name: partial(ours, RECIPE, *sets) for name, sets in OURS.items()}
    beside("mamba2", builds | {THEIRS: theirs}, THEIRS, __doc__)
