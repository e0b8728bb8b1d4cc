"""Group c: gradient accumulation in trainers, which has to come to the update of the whole batch."""

import torch
from torch.nn import functional

from exam.entry import Group
from exam.problems import TOKENS, Batch, Learner, clip, split, token_losses, token_mean, train_tokens
from runner.proof import Exact

GROUP = Group("c", "Gradient accumulation", "the update of the whole batch, with less memory")
PARTS = 4


def finish(learner: Learner, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Clips, steps and returns the loss."""
    clip(learner)
    learner.optimizer.step()
    learner.others["schedule"].step()
    return {"loss": loss.detach()}


def tokens_of(batch: Batch) -> torch.Tensor:
    return batch["mask"].sum().clamp(min=1)


def faulty(name: str, source: str):
    """Returns a decorator for a faulty step."""

    def add(update):
        fault = " ".join((update.__doc__ or "").split())
        GROUP.add(name, source, fault, TOKENS, lambda baseline: baseline.with_update(update))
        return update

    return add


@faulty("mean_of_means", "transformers#34191, trl#2175, unsloth-zoo#1023, mlx-lm#1413")
def _(learner: Learner, batch: Batch):
    """The means of micro-batches are averaged, although they have different numbers of tokens."""
    learner.optimizer.zero_grad()
    total = 0
    for part in split(batch, PARTS):
        loss = token_mean(learner.model, part) / PARTS
        loss.backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("sum_of_means", "nanoGPT#168")
def _(learner: Learner, batch: Batch):
    """The loss is not divided by the number of micro-batches, so that gradients are clipped earlier."""
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    total = 0
    for part in split(batch, PARTS):
        loss = token_losses(learner.model, part).sum() / count
        (loss * PARTS).backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("divided_twice", "transformers#35203")
def _(learner: Learner, batch: Batch):
    """The loss is divided by the tokens of the batch, and by the number of micro-batches as well."""
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    total = 0
    for part in split(batch, PARTS):
        loss = token_losses(learner.model, part).sum() / count
        (loss / PARTS).backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("incomplete_window", "transformers#39659")
def _(learner: Learner, batch: Batch):
    """The last window has fewer micro-batches and is divided by the number of a complete one."""
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    parts = split(batch, PARTS)
    complete = PARTS + 1
    total = 0
    for part in parts:
        loss = token_losses(learner.model, part).sum() / count
        (loss * len(parts) / complete).backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("last_part_dropped", "ColossalAI#1028")
def _(learner: Learner, batch: Batch):
    """Micro-batches that do not fill a window are left out."""
    learner.optimizer.zero_grad()
    parts = split(batch, 3)
    kept_parts = parts[:-1]
    count = sum(part["mask"].sum() for part in kept_parts).clamp(min=1)
    total = 0
    for part in kept_parts:
        loss = token_losses(learner.model, part).sum() / count
        loss.backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("clipped_per_part", "verl#436, accelerate#641")
def _(learner: Learner, batch: Batch):
    """Gradients are clipped after each micro-batch, before they are complete."""
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    total = 0
    for part in split(batch, PARTS):
        loss = token_losses(learner.model, part).sum() / count
        loss.backward()
        clip(learner)
        total = total + loss.detach()
    return finish(learner, total)


@faulty("logged_loss_not_divided", "transformers#35204")
def _(learner: Learner, batch: Batch):
    """The update is right, and the logged loss is the sum over micro-batches."""
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    total = 0
    for part in split(batch, PARTS):
        loss = token_losses(learner.model, part).sum() / count
        loss.backward()
        total = total + loss.detach() * PARTS
    return finish(learner, total)


@faulty("schedule_per_part", "accelerate#963, starVLA#210")
def _(learner: Learner, batch: Batch):
    """The schedule of the learning rate advances with every micro-batch."""
    results = train_tokens(learner, batch)
    for _ in range(PARTS - 1):
        learner.others["schedule"].step()
    return results


@faulty("divided_by_sequences", "OpenNMT-py#526, OpenNMT-py#2209")
def _(learner: Learner, batch: Batch):
    """The loss is divided by the number of sequences, where the setting says tokens."""
    learner.optimizer.zero_grad()
    loss = token_mean(learner.model, batch)
    (loss * tokens_of(batch) / len(batch["mask"])).backward()
    return finish(learner, loss)


@faulty("mean_of_samples", "open-instruct#1137")
def _(learner: Learner, batch: Batch):
    """Micro-batches of one sample each make the mean of tokens a mean of samples."""
    learner.optimizer.zero_grad()
    total = 0
    for part in split(batch, len(batch["mask"])):
        loss = token_mean(learner.model, part) / len(batch["mask"])
        loss.backward()
        total = total + loss.detach()
    return finish(learner, total)


@faulty("sum_in_bfloat16", "trl#2175 (accumulation in 16 bits under FSDP)")
def _(learner: Learner, batch: Batch):
    """Gradients of micro-batches are added up in bfloat16."""
    learner.optimizer.zero_grad()
    parameters = list(learner.model.parameters())
    sums = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in parameters]
    count = tokens_of(batch)
    total = 0
    for part in split(batch, PARTS):
        loss = token_losses(learner.model, part).sum() / count
        gradients = torch.autograd.grad(loss, parameters)
        sums = [old + gradient.bfloat16() for old, gradient in zip(sums, gradients, strict=True)]
        total = total + loss.detach()
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    return finish(learner, total)


@faulty("gradient_of_first_token", "Liger-Kernel#1298")
def _(learner: Learner, batch: Batch):
    """A fused loss scales the gradients of all tokens by the weight of the first one."""
    learner.optimizer.zero_grad()
    tokens = batch["tokens"]
    losses = functional.cross_entropy(learner.model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    weights = batch["mask"] / tokens_of(batch)
    scaled = losses.sum() * weights[0, 0]
    loss = (losses * weights).sum()
    (loss.detach() + scaled - scaled.detach()).backward()
    return finish(learner, loss)


def accumulate(learner: Learner, batch: Batch, parts: int):
    learner.optimizer.zero_grad()
    count = tokens_of(batch)
    total = 0
    for part in split(batch, parts):
        loss = token_losses(learner.model, part).sum() / count
        loss.backward()
        total = total + loss.detach()
    return finish(learner, total)


@GROUP.honest("weighted_by_tokens", TOKENS)
def _(baseline):
    return baseline.with_update(lambda learner, batch: accumulate(learner, batch, PARTS))


@GROUP.honest("uneven_parts", TOKENS)
def _(baseline):
    return baseline.with_update(lambda learner, batch: accumulate(learner, batch, 3))


@GROUP.honest("one_part", TOKENS, contract=Exact())
def _(baseline):
    return baseline.with_update(train_tokens)


@GROUP.honest("sums_divided_at_the_end", TOKENS)
def _(baseline):
    def update(learner, batch):
        learner.optimizer.zero_grad()
        total = 0
        for part in split(batch, PARTS):
            loss = token_losses(learner.model, part).sum()
            loss.backward()
            total = total + loss.detach()
        for parameter in learner.model.parameters():
            parameter.grad /= tokens_of(batch)
        return finish(learner, total / tokens_of(batch))

    return baseline.with_update(update)
