"""Exponential moving averages of parameters, which evaluation uses instead (``train.ema``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from runner.plugin.source import State

AVERAGES = "weight_averages"
"""Key of the averages in a learner's state."""
SMALLEST_FLOAT32_STEP = 2e-5
"""Below this share, a step is lost in the rounding of float32, and averages are kept in float64."""


class WeightAverages:
    """Averages of every parameter that can be averaged, in float32 or wider.

    Everything else (buffers, integer parameters) stays in the modules, so evaluation uses its
    current value. Modules are never copied: they may hold locks, generators or tensors that are
    recomputed in every forward pass.

    Args:
        modules: Modules by name; a parameter that is in several is averaged once.
        decay: Share of an average that stays in every update.
    """

    def __init__(self, modules: Mapping[str, nn.Module], decay: float) -> None:
        self.modules = dict(modules)
        self.decay = decay
        self.values: dict[str, Tensor] = {}
        for name, parameter in self.parameters():
            self.values[name] = self._widen(parameter)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that can be averaged, by ``<module>.<parameter>``."""
        yielded: set[int] = set()
        for module_name, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in yielded and _can_be_averaged(parameter):
                    yielded.add(id(parameter))
                    yield f"{module_name}.{name}", parameter

    @torch.no_grad()
    def update(self) -> None:
        """Moves every average a share ``1 - decay`` towards its parameter.

        An average starts with the parameter's value, and starts again if the
        parameter's shape has changed.
        """
        averages: list[Tensor] = []
        current: list[Tensor] = []
        for name, parameter in self.parameters():
            average = self.values.get(name)
            if average is None or average.shape != parameter.shape:
                self.values[name] = self._widen(parameter)
                continue
            averages.append(average)
            current.append(parameter.to(average.dtype))
        # One call for all parameters, because many small ones take longer.
        if averages:
            torch._foreach_lerp_(averages, current, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the averages into the parameters inside the ``with``, in place, so that captured
        addresses stay.

        Version counters are restored, too: a graph of autograd from before the ``with`` can be
        differentiated after it, and one from inside cannot.
        """
        trained: list[tuple[Tensor, Tensor]] = []
        versions: list[tuple[Tensor, int]] = []
        with torch.no_grad():
            for name, parameter in self.parameters():
                average = self.values.get(name)
                if average is not None and average.shape == parameter.shape:
                    trained.append((parameter, parameter.detach().clone()))
                    # Tensors of inference mode have no version counter.
                    if not parameter.is_inference():
                        versions.append((parameter, parameter._version))
                    parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in trained:
                    parameter.copy_(value)
            if versions:
                # The parameters have the same bits as in these versions.
                set_versions = torch._C._autograd._unsafe_set_version_counter
                set_versions(*zip(*versions, strict=True))

    def state_dict(self) -> State:
        """Returns the averages by the names of ``parameters``."""
        return dict(self.values)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of ``state_dict`` in place; missing averages start with
        the parameter.
        """
        for name, parameter in self.parameters():
            value = state.get(name, parameter)
            average = self.values.get(name)
            if average is None or average.shape != value.shape:
                self.values[name] = self._widen(value).to(parameter.device)
            else:
                average.copy_(value)

    def _widen(self, tensor: Tensor) -> Tensor:
        """Copies a tensor into a type that does not lose the steps of the average."""
        bits = 64 if 1 - self.decay < SMALLEST_FLOAT32_STEP else 32
        wide = torch.float64 if bits == 64 else torch.float32
        if tensor.is_complex():
            wide = wide.to_complex()
        dtype = wide if tensor.dtype.itemsize < wide.itemsize else tensor.dtype
        return tensor.detach().to(dtype, copy=True)


def saved_averages(learner_state: State) -> Mapping[str, Tensor] | None:
    """Returns the averages in a learner's saved state; None if it has none."""
    # Earlier versions stored the averages as a second module.
    older: Mapping[str, Tensor] | None = learner_state.get("modules", {}).get("average")
    if older is not None:
        return {f"model.{name}": value for name, value in older.items()}
    averages: Mapping[str, Tensor] | None = learner_state.get(AVERAGES)
    return averages


def _can_be_averaged(parameter: Tensor) -> bool:
    is_continuous = parameter.is_floating_point() or parameter.is_complex()
    return (
        is_continuous and not is_lazy(parameter) and parameter.layout == torch.strided
    )
