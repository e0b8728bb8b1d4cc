"""A stage that lets objects of one pipeline behave as changed classes do; whoever makes it gives the classes."""

from types import MethodType

from runner.api import Close, Stage, StageConfig

CHANGED = {}
"""Classes by those that they stand for."""


def change(classes, slots):
    """These, and the slots in which methods of their objects may be, which the stage then declares."""
    CHANGED.update(classes)
    MutatedModuleConfig.claims = frozenset(slots)


class MutatedModuleConfig(StageConfig):
    """Gives the learner, the source and what they hold the changed classes."""

    kind = "mutated_module"
    implementation = "MutatedModule"
    phase = 1

    def contract(self, setting):
        return Close()


class MutatedModule(Stage):
    def attach(self, pipeline):
        methods = []
        for each in list(_held([pipeline.learner, pipeline.source], set())):
            methods += [(each, name, value) for name, value in vars(each).items() if isinstance(value, MethodType)]
            object.__setattr__(each, "__class__", CHANGED[type(each)])  # settings do not let it happen otherwise
        for owner, name, value in methods:
            vars(owner)[name] = _anew(value)
        for name, step in list(vars(pipeline.slots).items()):
            if isinstance(step, MethodType) and type(step.__self__) in CHANGED.values():
                pipeline.slots.replace(name, _anew(step))


def _anew(method):
    """The method of that name that its object has now."""
    return getattr(method.__self__, method.__name__)


def _held(values, seen):
    """The objects that have another class, among these values and all that they hold."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            yield from _held(list(value.values()), seen)
        elif isinstance(value, list | tuple):
            yield from _held(list(value), seen)
        elif type(value) in CHANGED:
            yield value
            yield from _held(list(vars(value).values()), seen)
        elif hasattr(value, "modules"):  # a container of networks
            yield from _held(list(value.children()), seen)
