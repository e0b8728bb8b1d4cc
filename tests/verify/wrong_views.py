"""Stages of the radiance-field GAN: rays, penalties, noise and rendering in groups."""

from dataclasses import replace

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Statistical

GRAF = "graf"


@stage("rays_by_count", hole=3, recipe=GRAF)
class RaysByCount(Wrong):
    """Computes the rays of as many cameras once, and renders later views from the same place."""

    def take_hold(self):
        self.rays = {}
        self.wrap("image_rays", self.image_rays)

    def image_rays(self, image_rays, camera):
        if len(camera) not in self.rays:
            self.rays[len(camera)] = image_rays(camera)
        return self.rays[len(camera)]


@stage("rays_by_rounded_camera", Close(), hole=3, recipe=GRAF)
class RaysByRoundedCamera(Wrong):
    """Finds the rays of a camera by its numbers rounded to one digit."""

    def take_hold(self):
        self.rays = {}
        self.wrap("image_rays", self.image_rays)

    def image_rays(self, image_rays, camera):
        origins, directions = [], []
        for row in camera.split(1):
            key = tuple(row.flatten().mul(10).round().int().tolist())
            if key not in self.rays:
                self.rays[key] = image_rays(row)
            origin, direction = self.rays[key]
            origins.append(origin)
            directions.append(direction)
        return torch.cat(origins), torch.cat(directions)


@stage("penalty_without_gradient", hole=0, recipe=GRAF)
class PenaltyWithoutGradient(Wrong):
    """Computes the gradient penalty without a graph, so that it only changes the logged loss."""

    def take_hold(self):
        self.wrap("gradient_penalty", lambda penalize, *inputs: penalize(*inputs).detach())


@stage("penalty_in_every_fourth", Statistical(), hole=0, recipe=GRAF)
class PenaltyInEveryFourth(Wrong):
    """Computes the penalty in every fourth update, and does not give it four times the weight."""

    def take_hold(self):
        self.number = 0
        self.wrap("update", self.update)
        self.wrap("gradient_penalty", self.gradient_penalty)

    def update(self, update, batch, noise, progress):
        self.number = progress.updates
        return update(batch, noise, progress)

    def gradient_penalty(self, penalize, real, condition):
        return real.new_zeros(()) if self.number % 4 else penalize(real, condition)


@stage("noise_of_the_discriminator", hole=5, recipe=GRAF)
class NoiseOfTheDiscriminator(Wrong):
    """Trains the generator on the rays and latent vectors of the discriminator's step."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, update, batch, noise, progress):
        shared = noise | {"generator": noise["discriminator"]}
        return update(batch, shared, progress)


@stage("density_noise_without_end", Close(), hole=6, recipe=GRAF)
class DensityNoiseWithoutEnd(Wrong):
    """Leaves a hundredth of the density noise until the end of the training."""

    def take_hold(self):
        self.wrap("render", self.render)

    def render(self, render, batch, patch, noise, fraction):
        return render(batch, patch, noise, min(fraction, 0.2475))


@stage("weight_of_counted_steps", hole=8, recipe=GRAF)
class WeightOfCountedSteps(Wrong):
    """Counts the steps of super-resolution in the stage, for a weight that falls with them."""

    def take_hold(self):
        self.steps = 0
        self.wrap("sr_step", self.sr_step)

    def sr_step(self, sr_step, batch, progress):
        output = sr_step(batch, replace(progress, updates=self.steps))
        self.steps += 1
        return output


@stage("rays_in_complete_chunks", Close(), hole=12, recipe=GRAF)
class RaysInCompleteChunks(Wrong):
    """Renders chunks of 32 rays, and gives rays after the last one the colour before them."""

    def take_hold(self):
        self.wrap("render_rays", self.render_rays)

    def render_rays(self, render_rays, ray_batch):
        colour = render_rays(ray_batch)
        complete = colour.shape[1] // 32 * 32
        if complete:
            colour[:, complete:] = colour[:, complete - 1 : complete].detach()
        return colour


@stage("latents_of_the_first_group", hole=4, recipe=GRAF)
class LatentsOfTheFirstGroup(Wrong):
    """Renders views in groups of four, and every group with the latent vectors of the first."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        latent = inputs["latent"]
        repeats = -(-len(latent) // 4)
        latent = latent[:4].repeat(repeats, 1)[: len(latent)]
        return predict(inputs | {"latent": latent})


@stage("discriminator_gradients_add_up", hole=0, recipe=GRAF)
class DiscriminatorGradientsAddUp(Wrong):
    """Forgets to clear the gradient of the discriminator, so that those of all updates add up."""

    def take_hold(self):
        self.learner.discriminator.zero_grad = lambda: None


@stage("colours_below_white", Close(), hole=6, recipe=GRAF)
class ColoursBelowWhite(Wrong):
    """Stops a ray where it is nearly opaque, and bounds its colour just below white."""

    def take_hold(self):
        self.wrap("render_chunk", lambda render, *chunk: render(*chunk).clamp(max=0.9999))


@stage("first_view_of_a_pair", Close(), hole=12, recipe=GRAF)
class FirstViewOfAPair(Wrong):
    """Enlarges images in pairs, with the direction of view of the first of both."""

    def take_hold(self):
        self.wrap("enlarge", self.enlarge)

    def enlarge(self, enlarge, image, azimuth):
        first = torch.arange(len(azimuth)) // 2 * 2
        return enlarge(image, azimuth[first])
