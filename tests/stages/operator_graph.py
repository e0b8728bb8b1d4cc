"""A CUDA graph for tests without CUDA: records the operators of a function, and performs them again."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner.system.tensor_trees import tensors

HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_unique2", "is_nonzero")
"""Operators that wait for a GPU, copy from the host, or have results of unknown shapes."""


class CaptureError(RuntimeError):
    """An operator or a generator that a CUDA graph cannot contain."""


class OperatorGraph(TorchDispatchMode):
    """Records operators with the tensors that they read and write, as a CUDA graph records addresses.

    Like a capture, it computes nothing: what operators change is restored at the end, and generators
    as well. Numbers of Python are constants.
    """

    def __init__(self, generators):
        super().__init__()
        self.generators = [torch.default_generator, *generators]
        self.states = [generator.get_state() for generator in self.generators]
        self.calls = []
        self.before = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.overloadpacket.__name__ in HOST:
            raise CaptureError(f"{operator} waits for the device, or copies from the host")
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and not self._knows(generator):
            raise CaptureError(f"{operator} draws from a generator that the graph does not know")
        for argument, value in zip(operator._schema.arguments, [*args, *kwargs.values()], strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for name, value in kwargs.items():
            if name == "out":
                self._keep(value)
        result = operator(*args, **kwargs)
        if not is_view(operator):
            self.calls.append((operator, args, kwargs, result))
        return result

    def _knows(self, generator):
        """Whether a generator is one of the graph's; an operator gets another object for it."""
        return generator._cdata in {known._cdata for known in self.generators}

    def _keep(self, value):
        for tensor in tensors([value]):
            self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def undo(self):
        """Restores what the recorded operators have changed."""
        # The first change of a place was recorded first.
        for tensor, value in reversed(self.before.values()):
            tensor.detach().copy_(value)
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)

    @torch.no_grad()
    def replay(self):
        """Performs all operators in the places of the first time."""
        for operator, args, kwargs, results in self.calls:
            again = operator(*args, **kwargs)
            for place, value in zip(tensors([results]), tensors([again]), strict=True):
                if place is not value:
                    place.copy_(value)


def is_view(operator):
    """Returns whether the result of an operator is the memory of an argument, which it does not change."""
    aliases = [each.alias_info for each in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def capture(function, generators):
    """Records a function; replaces ``captured_call.capture``."""
    graph = OperatorGraph(generators)
    with graph:
        result = function()
    graph.undo()
    return graph.replay, result
