"""Group d: reductions over ranks that are not the mean of the whole batch. Ranks are simulated in one process."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from exam.accumulation import finish, tokens_of
from exam.entry import Group
from exam.problems import CLASSIFIER, TOKENS, Batch, Learner, split, token_losses, token_mean

GROUP = Group("d", "Reductions over ranks", "four ranks train as one process does")
RANKS = 4
LIMIT = 0.25

Gradients = list[Tensor]


def rank_gradients(learner: Learner, batch: Batch, loss_of: Callable) -> tuple[list[Gradients], list[Tensor]]:
    """Returns the gradients and the loss of every rank."""
    parameters = list(learner.model.parameters())
    gradients = []
    losses = []
    for part in split(batch, RANKS):
        loss = loss_of(learner.model, part)
        gradients.append(list(torch.autograd.grad(loss, parameters)))
        losses.append(loss.detach())
    return gradients, losses


def summed(gradients: list[Gradients]) -> Gradients:
    return [torch.stack(tensors).sum(0) for tensors in zip(*gradients, strict=True)]


def assign(learner: Learner, gradients: Gradients) -> None:
    for parameter, gradient in zip(learner.model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def total_norm(gradients: Gradients) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def scaled(gradients: Gradients, factor) -> Gradients:
    return [gradient * factor for gradient in gradients]


def to_norm(gradients: Gradients, norm: Tensor) -> Gradients:
    """Scales gradients as clipping to the limit does if they had this norm."""
    return scaled(gradients, (LIMIT / (norm + 1e-6)).clamp(max=1.0))


def faulty(name: str, source: str):
    """Returns a decorator for a faulty step."""

    def add(update):
        fault = " ".join((update.__doc__ or "").split())
        GROUP.add(name, source, fault, TOKENS, lambda baseline: baseline.with_update(update))
        return update

    return add


def shares(model, part: Batch, count: Tensor) -> Tensor:
    return token_losses(model, part).sum() / count


def right_gradients(learner: Learner, batch: Batch) -> tuple[list[Gradients], Tensor]:
    """Returns gradients of every rank that add up to the right one, and the right loss."""
    count = tokens_of(batch)
    gradients, losses = rank_gradients(learner, batch, lambda model, part: shares(model, part, count))
    return gradients, torch.stack(losses).sum()


@faulty("mean_of_rank_means", "transformers#34242, prime-rl#2358, speculators#942")
def _(learner: Learner, batch: Batch):
    """Every rank divides by its own number of tokens before the ranks are averaged."""
    gradients, losses = rank_gradients(learner, batch, token_mean)
    assign(learner, scaled(summed(gradients), 1 / RANKS))
    return finish(learner, torch.stack(losses).mean())


@faulty("sum_instead_of_mean", "torchtitan#2318")
def _(learner: Learner, batch: Batch):
    """Gradients are summed over the ranks where they should be averaged."""
    gradients, loss = right_gradients(learner, batch)
    assign(learner, scaled(summed(gradients), RANKS))
    return finish(learner, loss)


@faulty("divided_by_ranks_again", "Arctic-Platform#119, ms-swift#10150")
def _(learner: Learner, batch: Batch):
    """The loss is already divided by all tokens, and the reduction divides by the ranks again."""
    gradients, loss = right_gradients(learner, batch)
    assign(learner, scaled(summed(gradients), 1 / RANKS))
    return finish(learner, loss)


@faulty("clipped_before_reduction", "SpecForge#663, AReaL#312")
def _(learner: Learner, batch: Batch):
    """Every rank clips its gradient by its own norm, before the reduction."""
    gradients, loss = right_gradients(learner, batch)
    local = [scaled(to_norm(scaled(rank, RANKS), total_norm(scaled(rank, RANKS))), 1 / RANKS) for rank in gradients]
    assign(learner, summed(local))
    return finish(learner, loss)


@faulty("clipped_by_shard", "pytorch#170862")
def _(learner: Learner, batch: Batch):
    """Every rank clips its shard of the parameters by the norm of that shard."""
    gradients, loss = right_gradients(learner, batch)
    shards = summed(gradients)
    assign(learner, [to_norm([shard], shard.norm())[0] for shard in shards])
    return finish(learner, loss)


@faulty("norm_reduced_twice", "twinkle#290")
def _(learner: Learner, batch: Batch):
    """Ranks that have the same gradient add up their squared norms, so that the norm is too large."""
    gradients, loss = right_gradients(learner, batch)
    complete = summed(gradients)
    assign(learner, to_norm(complete, total_norm(complete) * RANKS**0.5))
    return finish(learner, loss)


@faulty("not_synchronized", "VeOmni#1059")
def _(learner: Learner, batch: Batch):
    """A process group of one rank makes the reduction do nothing: every rank follows its own part."""
    gradients, loss = right_gradients(learner, batch)
    assign(learner, scaled(gradients[0], RANKS))
    return finish(learner, loss)


@faulty("samples_repeated_to_pad", "documentation of torch.utils.data.DistributedSampler")
def _(learner: Learner, batch: Batch):
    """Samples are repeated until every rank has as many, and count twice."""
    padded = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in batch.items()}
    count = tokens_of(padded)
    gradients, losses = rank_gradients(learner, padded, lambda model, part: shares(model, part, count))
    assign(learner, summed(gradients))
    return finish(learner, torch.stack(losses).sum())


@faulty("reduced_in_bfloat16", "trl#2175 (reduction in 16 bits under FSDP)")
def _(learner: Learner, batch: Batch):
    """Gradients are sent and added up in bfloat16."""
    gradients, loss = right_gradients(learner, batch)
    short = [[gradient.bfloat16() for gradient in rank] for rank in gradients]
    total = [gradient.to(loss.dtype) for gradient in summed(short)]
    assign(learner, total)
    return finish(learner, loss)


@faulty("logged_loss_of_ranks", "DeepSpec#34")
def _(learner: Learner, batch: Batch):
    """The update is right, and the logged loss is the mean of the means of the ranks."""
    gradients, _ = right_gradients(learner, batch)
    means = [token_mean(learner.model, part).detach() for part in split(batch, RANKS)]
    assign(learner, summed(gradients))
    return finish(learner, torch.stack(means).mean())


@GROUP.wrong("batch_norm_of_a_rank", "pytorch-lightning#6789", CLASSIFIER)
def _(baseline):
    """Every rank normalizes by the statistics of its own part of the batch."""

    def update(learner, batch):
        learner.optimizer.zero_grad()
        total = 0
        for part in split(batch, RANKS):
            loss = functional.cross_entropy(learner.model(part["x"]), part["y"]) / RANKS
            loss.backward()
            total = total + loss.detach()
        learner.optimizer.step()
        return {"loss": total}

    return baseline.with_update(update)


@GROUP.honest("weighted_reduction", TOKENS)
def _(baseline):
    def update(learner, batch):
        gradients, loss = right_gradients(learner, batch)
        assign(learner, summed(gradients))
        return finish(learner, loss)

    return baseline.with_update(update)


@GROUP.honest("ring_order", TOKENS)
def _(baseline):
    def update(learner, batch):
        gradients, loss = right_gradients(learner, batch)
        total = gradients[2]
        for rank in (3, 0, 1):
            total = [left + right for left, right in zip(total, gradients[rank], strict=True)]
        assign(learner, total)
        return finish(learner, loss)

    return baseline.with_update(update)


@GROUP.honest("flat_bucket", TOKENS)
def _(baseline):
    def update(learner, batch):
        gradients, loss = right_gradients(learner, batch)
        buckets = [torch.cat([gradient.flatten() for gradient in rank]) for rank in gradients]
        bucket = torch.stack(buckets).sum(0)
        sizes = [parameter.numel() for parameter in learner.model.parameters()]
        shapes = [parameter.shape for parameter in learner.model.parameters()]
        assign(learner, [flat.view(shape) for flat, shape in zip(bucket.split(sizes), shapes, strict=True)])
        return finish(learner, loss)

    return baseline.with_update(update)
