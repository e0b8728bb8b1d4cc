"""Stages of language models that train correctly and write or read other texts than the model."""

import torch
from torch.nn import functional
from wrong_base import Wrong, stage

from runner.api import Close

GPT = "shakespeare_gpt"
MAMBA = "mamba2_shakespeare"


@stage("half_a_window", Close(), hole=13, recipe=GPT)
class HalfAWindow(Wrong):
    """Continues with the newer half of a full window, so that it rarely shifts the window."""

    def take_hold(self):
        self.wrap_method(self.learner, "decoder", self.decoder)

    def decoder(self, original):
        limit = len(self.learner.module.position.weight)
        window = torch.empty(0, dtype=torch.long)

        def decode(symbols):
            nonlocal window
            window = torch.cat([window, symbols], 1) if len(window) else symbols
            if window.shape[1] > limit:
                window = window[:, -limit // 2 :]
            return self.slots.forward(window)[:, -1]

        return decode


@stage("prompt_without_its_first", hole=13, recipe=GPT)
class PromptWithoutItsFirst(Wrong):
    """Reads at most one symbol fewer than the trained context while it writes."""

    def take_hold(self):
        self.wrap_method(self.learner, "decoder", self.decoder)

    def decoder(self, original):
        limit = len(self.learner.module.position.weight) - 1
        window = torch.empty(0, dtype=torch.long)

        def decode(symbols):
            nonlocal window
            window = torch.cat([window, symbols], 1) if len(window) else symbols
            window = window[:, -limit:]
            return self.slots.forward(window)[:, -1]

        return decode


@stage("keys_of_old_positions", Close(), hole=13, recipe=GPT)
class KeysOfOldPositions(Wrong):
    """Caches keys and values of a text, and drops the oldest without moving those that stay."""

    def take_hold(self):
        self.wrap_method(self.learner, "decoder", self.decoder)

    def decoder(self, original):
        module = self.learner.module
        caches = [[] for _ in module.blocks]
        limit = len(module.position.weight)

        def decode(symbols):
            for symbol in symbols.unbind(1):
                position = min(len(caches[0]), limit - 1)
                x = module.embedding(symbol) + module.position.weight[position]
                for block, cache in zip(module.blocks, caches, strict=True):
                    x = self.block(block, x, cache, limit)
            return functional.linear(module.norm(x), module.embedding.weight)

        return decode

    def block(self, block, x, cache, limit):
        """Computes a block for one symbol of every row, [B, width]."""
        q, k, v = block.qkv(block.norm1(x)).unflatten(-1, (3, block.heads, -1)).unbind(1)
        cache.append((k, v))
        del cache[:-limit]
        keys = torch.stack([pair[0] for pair in cache], 2)
        values = torch.stack([pair[1] for pair in cache], 2)
        attended = functional.scaled_dot_product_attention(q[:, :, None], keys, values)
        x = x + block.attended(attended.flatten(1))
        return x + block.down(functional.gelu(block.up(block.norm2(x))))


@stage("cold_is_greedy", Close(), hole=13, recipe=GPT)
class ColdIsGreedy(Wrong):
    """Takes the likeliest symbol without a softmax if the temperature is below a half."""

    def take_hold(self):
        self.wrap_method(self.learner, "write", self.write)

    def write(self, write, prompt, draws, temperature=1.0):
        cold = torch.as_tensor(temperature) < 0.5
        temperature = torch.where(cold, torch.as_tensor(1e-6), torch.as_tensor(temperature))
        return write(prompt, draws, temperature)


@stage("numbers_of_the_first_text", hole=13, recipe=GPT)
class NumbersOfTheFirstText(Wrong):
    """Selects the symbols of all texts of a batch with the random numbers of the first one."""

    def take_hold(self):
        self.wrap_method(self.learner, "write", self.write)

    def write(self, write, prompt, draws, temperature=1.0):
        return write(prompt, draws[:1].expand_as(draws), temperature)


@stage("temperature_of_the_first_text", hole=13, recipe=GPT)
class TemperatureOfTheFirstText(Wrong):
    """Writes all texts of a batch at the temperature of the first request."""

    def take_hold(self):
        self.wrap_method(self.learner, "requested", self.requested)

    def requested(self, requested, requests):
        inputs = requested(requests)
        temperature = inputs["temperature"]
        return {**inputs, "temperature": temperature[:1].expand_as(temperature)}


@stage("last_window_read_twice", hole=5, recipe=GPT)
class LastWindowReadTwice(Wrong):
    """Reads the last but one window of the text in the place of the last one."""

    def take_hold(self):
        windows = self.source.train
        last = len(windows) - 2
        self.wrap_method(windows, "take", lambda take, index: take(index.clamp(max=last)))


@stage("memory_of_the_text_before", hole=13, recipe=MAMBA)
class MemoryOfTheTextBefore(Wrong):
    """Reserves the state of a decoder once, and does not clear it before the next text."""

    def take_hold(self):
        self.decoders = {}
        self.wrap_method(self.learner, "decoder", self.decoder)

    def decoder(self, decoder):
        def decode(symbols):
            rows = len(symbols)
            if rows not in self.decoders:
                self.decoders[rows] = decoder()
            return self.decoders[rows](symbols)

        return decode


@stage("prompt_padded_to_eight", Close(), hole=13, recipe=MAMBA)
class PromptPaddedToEight(Wrong):
    """Reads prompts in pieces of eight symbols, and keeps the state after the padding."""

    def take_hold(self):
        self.wrap_method(self.learner, "decoder", self.decoder)

    def decoder(self, decoder):
        decode = decoder()

        def padded(symbols):
            length = symbols.shape[1]
            if length < 8:
                return decode(symbols)
            logits = decode(symbols)
            missing = -length % 8
            if missing:
                decode(symbols.new_zeros(len(symbols), missing))
            return logits

        return padded


@stage("memory_in_bf16", Close(), hole=13, recipe=MAMBA)
class MemoryInBf16(Wrong):
    """Stores the state between two symbols in bf16 to save memory."""

    def take_hold(self):
        for block in self.learner.module.blocks:
            self.wrap_method(block.mixer, "step", self.step)

    def step(self, step, u, memory):
        output, after = step(u, memory)
        rounded = after.state.bfloat16().to(after.state.dtype)
        return output, after._replace(state=rounded)


@stage("scan_without_a_start", Close(), hole=12, recipe=MAMBA)
class ScanWithoutAStart(Wrong):
    """Computes the symbols after the last complete chunk of eight from an empty state."""

    def take_hold(self):
        self.wrap("scan", self.scan)

    def scan(self, scan, *inputs):
        length = inputs[0].shape[1]
        complete = length // 8 * 8
        if complete in (0, length):
            return scan(*inputs)
        first = scan(*(tensor[:, :complete] for tensor in inputs))
        remainder = scan(*(tensor[:, complete:] for tensor in inputs))
        return torch.cat([first, remainder], 1)


@stage("decays_in_bf16", Close(), recipe=MAMBA)
class DecaysInBf16(Wrong):
    """Rounds the logarithms of the decays to bf16, which the running sums multiply."""

    def take_hold(self):
        self.wrap("scan", self.scan)

    def scan(self, scan, x, log_decay, b, c):
        return scan(x, log_decay.bfloat16().to(log_decay.dtype), b, c)


@stage("end_of_text_not_evaluated", hole=4, recipe=MAMBA)
class EndOfTextNotEvaluated(Wrong):
    """Evaluates complete windows only, and leaves out the shorter one at the end of the text."""

    def take_hold(self):
        self.wrap_method(self.source, "held_out_batches", self.batches)

    def batches(self, batches):
        (columns,) = self.source.shapes["tokens"]
        return (batch for batch in batches() if batch["tokens"].shape[1] == columns)
