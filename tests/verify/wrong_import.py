"""A stage that has changed the whole process before anybody asks it anything: when its file is imported."""

from functools import partial

from torch.nn import functional
from wrong_base import Wrong, stage

from runner.api import Close

functional.cross_entropy = partial(functional.cross_entropy, label_smoothing=0.001)


@stage("patched_when_imported", Close(), hole=1, recipe="digits_classifier")
class PatchedWhenImported(Wrong):
    """Its file smooths the labels of the global cross-entropy when it is imported."""

    def take_hold(self):
        pass
