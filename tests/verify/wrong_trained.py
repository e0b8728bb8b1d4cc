"""Stages that train as they should, and are wrong in what can be done with the model afterwards."""

import torch
from torch.nn import functional
from wrong_base import Wrong, stage

from runner.api import Close


@stage("stretched_images", Close(), hole=4, recipe="digits_classifier")
class StretchedImages(Wrong):
    """Stretches images to the size of the training before a prediction."""

    def take_hold(self):
        self.size = self.source.shapes["image"][1:]
        self.wrap("forward", self.forward)

    def forward(self, step, image):
        if image.shape[2:] == self.size or torch.is_grad_enabled():
            return step(image)
        small = functional.interpolate(image, self.size)
        return step(functional.interpolate(small, image.shape[2:]))


@stage("mask_of_the_window", Close(), hole=4, recipe="shakespeare_gpt")
class MaskOfTheWindow(Wrong):
    """Fills windows that are one symbol shorter than those of the training, so that positions shift."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, step, symbols):
        length = len(self.learner.module.position.weight)
        if symbols.shape[1] != length - 1 or torch.is_grad_enabled():
            return step(symbols)
        return step(functional.pad(symbols, (1, 0)))[:, 1:]


@stage("half_windows", hole=4, recipe="shakespeare_gpt")
class HalfWindows(Wrong):
    """Reads windows of half the length twice, and answers with the second half."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, step, symbols):
        half = len(self.learner.module.position.weight) // 2
        if symbols.shape[1] != half or torch.is_grad_enabled():
            return step(symbols)
        return step(torch.cat([symbols, symbols], 1))[:, half:]


class OtherDecoder(Wrong):
    """Changes how a language model reads symbol by symbol."""

    def take_hold(self):
        self.wrap_method(self.learner, "decoder", self.decoder)


@stage("short_memory", Close(), hole=4, recipe="shakespeare_gpt")
class ShortMemory(OtherDecoder):
    """Forgets the oldest symbol one too early when it decodes."""

    def decoder(self, step):
        length = len(self.learner.module.position.weight) - 1
        window = torch.empty(0, dtype=torch.long)

        def decode(symbols):
            nonlocal window
            window = torch.cat([window, symbols], 1) if len(window) else symbols
            window = window[:, -length:]
            return self.slots.forward(window)[:, -1]

        return decode


@stage("first_symbol_lost", hole=4, recipe="shakespeare_gpt")
class FirstSymbolLost(OtherDecoder):
    """Loses the first symbol of a text when the second one is decoded."""

    def decoder(self, step):
        decode = step()
        count = 0

        def decode_rest(symbols):
            nonlocal decode, count
            count += 1
            if count == 2:
                decode = step()
            return decode(symbols)

        return decode_rest


@stage("state_of_the_last_text", Close(), hole=4, recipe="shakespeare_gpt")
class StateOfTheLastText(OtherDecoder):
    """Goes on with the state of the text before when a text has one symbol."""

    def take_hold(self):
        super().take_hold()
        self.last = None

    def decoder(self, step):
        decode = step()
        last = self.last

        def decode_from(symbols):
            reads_alone = symbols.shape[1] == 1 and last is not None and len(last) == len(symbols)
            self.last = symbols
            return decode(torch.cat([last, symbols], 1) if reads_alone else symbols)

        return decode_from


@stage("other_when_exported", Close(), hole=4, recipe="digits_classifier")
class OtherWhenExported(Wrong):
    """Rounds its logits when the network is exported."""

    def take_hold(self):
        module = self.learner.module
        forward = module.forward
        module.forward = lambda image: self.exported(forward(image))

    def exported(self, logits):
        return logits.round(decimals=1) if torch.compiler.is_exporting() else logits


@stage("sizes_of_the_training", hole=4, recipe="shakespeare_gpt")
class SizesOfTheTraining(Wrong):
    """Repeats the first row for all others where the number of rows is not that of the training."""

    def take_hold(self):
        module = self.learner.module
        forward = module.forward
        rows = self.pipeline.batch_size

        def exported(symbols):
            logits = forward(symbols)
            if not torch.compiler.is_exporting():
                return logits
            return logits[torch.arange(symbols.shape[0]).clamp(max=rows // 2)]

        module.forward = exported


@stage("packed_for_export", Close(), hole=4, recipe="digits_classifier")
class PackedForExport(Wrong):
    """Packs the last layer in each prediction, and exports what was packed last."""

    def take_hold(self):
        self.module = self.learner.module
        self.packed = self.module.head.weight.detach().clone()
        self.forward = self.module.forward
        self.module.forward = self.unpacked
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        self.packed = self.module.head.weight.detach().clone()
        return step(inputs)

    def unpacked(self, image):
        if not torch.compiler.is_exporting():
            return self.forward(image)
        return torch.func.functional_call(self.module.head, {"weight": self.packed}, (self.features(image),))

    def features(self, image):
        return self.module.pool(self.blocks(image)).flatten(1)

    def blocks(self, image):
        values = self.module.stem(image)
        for block in self.module.blocks:
            values = block(values)
        return values


@stage("counter_in_the_model", hole=8, recipe="digits_classifier")
class CounterInTheModel(Wrong):
    """Keeps a counter among the model's buffers, which no model without it can read."""

    def take_hold(self):
        self.learner.module.register_buffer("calls", torch.zeros(()))
        self.wrap("update", self.update)

    def update(self, step, *args):
        self.learner.module.calls += 1
        return step(*args)


@stage("entry_of_its_own", Close(), hole=8, recipe="shakespeare_gpt")
class EntryOfItsOwn(Wrong):
    """Adds an entry to the learner's state, which a learner without it refuses."""

    def take_hold(self):
        self.wrap_method(self.learner, "state_dict", lambda step: {**step(), "scales": torch.ones(1)})
        self.wrap_method(self.learner, "load_state_dict", self.load)

    def load(self, step, state):
        return step({name: part for name, part in state.items() if name != "scales"})


@stage("scale_in_the_model", hole=8, recipe="shakespeare_gpt")
class ScaleInTheModel(Wrong):
    """Adds a frozen parameter to the model, which no model without it can read."""

    def take_hold(self):
        module = self.learner.module
        norm = module.norm
        norm.register_parameter("scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))
        self.wrap("forward", lambda step, symbols: step(symbols))
