"""Stages of the radiance-field GAN that are wrong on purpose, and a learner with batch norm."""

from typing import ClassVar

import torch
from torch import nn
from wrong_on_purpose import wrong

from runner.api import Close, Progress, Stage
from runner.plugins.radiance.config import RadianceGanConfig
from runner.plugins.radiance.learner import RadianceGan
from runner.plugins.radiance.replay import render_and_replay


class MixingGanConfig(RadianceGanConfig):
    """The radiance-field GAN whose discriminator has batch norm instead of instance norm."""

    kind: ClassVar[str] = "mixing_gan"
    implementation = "MixingGan"


class MixingGan(RadianceGan):
    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        network = self.discriminator.module.network
        network[3] = nn.BatchNorm2d(network[3].num_features, track_running_stats=False)


@wrong("unchecked_merge", ["judge_pair"], Close)
class UncheckedMerge(Stage):
    """Passes real and rendered patches as one batch, whatever the discriminator does with it."""

    def attach(self, pipeline):
        judge = pipeline.slots.judge

        def merged(real, fake, condition):
            logits = judge(torch.cat([real, fake]), torch.cat([condition, condition]))
            return logits.chunk(2)

        pipeline.slots.wrap("judge_pair", lambda step: merged)


@wrong("deleted_before_it_is_logged", ["discriminator_step"])
class DeletedBeforeItIsLogged(Stage):
    """Deletes a loss to save memory, and logs it afterwards."""

    def attach(self, pipeline):
        def deleting(step):
            def discriminator_step(*arguments):
                total_d_loss = step(*arguments)
                del total_d_loss
                return total_d_loss  # noqa: F821 (that is the mistake)

            return discriminator_step

        pipeline.slots.wrap("discriminator_step", deleting)


@wrong("metric_deleted", ["discriminator_step"])
class MetricDeleted(Stage):
    """Deletes what is logged of the penalty."""

    def attach(self, pipeline):
        def deleting(step):
            def discriminator_step(*arguments):
                output = dict(step(*arguments))
                del output["r1"]
                return output

            return discriminator_step

        pipeline.slots.wrap("discriminator_step", deleting)


@wrong("r1_in_bf16", ["gradient_penalty"], Close)
class R1InBf16(Stage):
    """Leaves autocast around the call alone, which does not change operations that are recorded in 16 bits."""

    def attach(self, pipeline):
        discriminator = pipeline.learner.discriminator.module

        def penalty(real, condition):
            real = real.detach().requires_grad_()
            with torch.autocast(real.device.type, torch.bfloat16):
                logit = discriminator(real, condition)
            (slope,) = torch.autograd.grad(logit.float().sum(), real, create_graph=True)
            return slope.square().flatten(1).sum(1).mean()

        pipeline.slots.wrap("gradient_penalty", lambda step: penalty)


@wrong("ray_cache_by_position", ["image_rays"])
class RayCacheByPosition(Stage):
    """Keeps rays by the position of an image in its batch."""

    def attach(self, pipeline):
        kept = {}

        def remembering(cast_rays):
            def image_rays(camera):
                origin, direction = cast_rays(camera)
                rows = [kept.setdefault(row, direction[row]) for row in range(len(camera))]
                return origin, torch.stack(rows)

            return image_rays

        pipeline.slots.wrap("image_rays", remembering)


@wrong("accumulation_with_shared_noise", ["forward_backward"], Close)
class AccumulationWithSharedNoise(Stage):
    """Accumulates gradients of two halves, and gives both the noise of the first."""

    def attach(self, pipeline):
        source = pipeline.source

        def halving(step):
            def forward_backward(batch, noise, progress, **options):
                size = source.size(batch)
                losses = []
                for part in source.split(batch, (size + 1) // 2):
                    count = source.size(part)
                    shared = {name: table[:count] for name, table in noise.items()}
                    loss = step(part, shared, progress, lambda count, size=size: size, **options)
                    losses.append(loss)
                return type(losses[0]).total(losses)

            return forward_backward

        pipeline.slots.wrap("forward_backward", halving)


@wrong("lazy_r1_without_weight", ["update", "gradient_penalty"])
class LazyR1WithoutWeight(Stage):
    """Computes the penalty in every fourth update, and does not multiply it."""

    def attach(self, pipeline):
        number = [0]

        def numbered(step):
            def update(batch, noise, progress):
                number[0] = progress.updates
                return step(batch, noise, progress)

            return update

        def lazy(penalize):
            def gradient_penalty(real, condition):
                return real.new_zeros(()) if number[0] % 4 else penalize(real, condition)

            return gradient_penalty

        pipeline.slots.wrap("update", numbered)
        pipeline.slots.wrap("gradient_penalty", lazy)


@wrong("ray_chunk_dropped", ["render_rays"])
class RayChunkDropped(Stage):
    """Replays all chunks of rays but the last."""

    def attach(self, pipeline):
        learner, slots = pipeline.learner, pipeline.slots

        def dropping(step):
            def render_rays(ray_batch):
                if not torch.is_grad_enabled():
                    return step(ray_batch)
                chunks = ray_batch.chunks(learner.config.ray_chunk)
                parameters = learner.generator.parameters()
                kept = render_and_replay(slots.render_chunk, chunks[:-1], parameters)
                with torch.no_grad():
                    last = slots.render_chunk(*chunks[-1])
                return torch.cat([kept, last], 1)

            return render_rays

        pipeline.slots.wrap("render_rays", dropping)


@wrong("replay_with_other_jitter", ["render_chunk"])
class ReplayWithOtherJitter(Stage):
    """Draws the positions of samples where rays are rendered, so that they are others each time."""

    def attach(self, pipeline):
        def jittering(step):
            def render_chunk(origin, direction, latent, label, uniform, density_noise):
                drawn = torch.rand_like(uniform)
                return step(origin, direction, latent, label, drawn, density_noise)

            return render_chunk

        pipeline.slots.wrap("render_chunk", jittering)


@wrong("labels_tiled", ["render"])
class LabelsTiled(Stage):
    """Gives patches the labels of other samples of their batch."""

    def attach(self, pipeline):
        def tiling(step):
            def render(batch, patch, noise, fraction):
                return step({**batch, "label": batch["label"].roll(1)}, patch, noise, fraction)

            return render

        pipeline.slots.wrap("render", tiling)


@wrong("weight_counted_in_calls", ["sr_step"])
class WeightCountedInCalls(Stage):
    """Counts the updates of super-resolution by itself, and forgets the count when a run is resumed."""

    def attach(self, pipeline):
        calls = [0]

        def counting(step):
            def sr_step(batch, progress):
                counted = Progress("updates", progress.length)
                counted.updates = calls[0]
                calls[0] += 1
                return step(batch, counted)

            return sr_step

        pipeline.slots.wrap("sr_step", counting)
