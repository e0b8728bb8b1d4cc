"""The faces of the image classifier and its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import (
    ClassWeightsConfig,
    DatasetConfig,
    GradientLearnerConfig,
    Objective,
    RecipePath,
    ServedRequest,
    ServedResponse,
    SourceOutline,
    TensorOutline,
)

EXTRA = "pip install 'proven-runner[vision]'"
"""Brings what the sources need."""


CONVOLUTION_SLOTS = frozenset({"conv", "conv_workspace", "conv_plans"})
"""Slots of a learner whose layers are ``Convolution``: the convolution, memory for its
intermediate results, and what keeps plans between processes.
"""


Share = Annotated[float, Field(ge=0, le=1)]


Row = Annotated[list[Share], Field(max_length=1024)]
Channel = Annotated[list[Row], Field(max_length=1024)]


class ImageRequest(ServedRequest):
    """An image of the size of the training images."""

    image: Annotated[list[Channel], Field(max_length=64)]
    """[C, H, W], from 0 (black) to 1."""


class ClassesResponse(ServedResponse):
    """The class of an image."""

    label: int
    """The most probable class."""
    name: str | None = None
    """Name of that class, for example of its folder; null if the data have no names."""
    probabilities: list[Share]
    """Of every class."""


class ImageClassifierConfig(ClassWeightsConfig, GradientLearnerConfig):
    """Settings that every classifier of images has."""

    sample_losses: ClassVar[bool] = True
    learns_from: ClassVar[str] = "labelled_images"
    classifies: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    objective: ClassVar[Objective] = Objective(
        "accuracy", "maximize", margin=0.01, unit="share"
    )
    request: ClassVar[type[ServedRequest]] = ImageRequest
    response: ClassVar[type[ServedResponse]] = ClassesResponse
    page: ClassVar[str | None] = "page"
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"loss": (0, math.inf)}

    shift: Annotated[int, Field(ge=0)] = 0
    """Pixels by which every training image is moved at random, at most, in either direction."""


class ConvolutionalClassifierConfig(ImageClassifierConfig):
    """Settings of a classifier with convolutions."""

    slots: ClassVar[frozenset[str]] = ImageClassifierConfig.slots | CONVOLUTION_SLOTS


class ClassifierConfig(ConvolutionalClassifierConfig):
    """A small residual convolutional network with group normalisation, for images of one size.

    Of every width there are two blocks of two 3 x 3 convolutions (He et al. 2016,
    arXiv:1512.03385); the first block of every width but the first halves height and width.
    Nothing in it depends on the batch (Wu and He 2018, arXiv:1803.08494), so that a batch may be
    cut into parts.

    When it helps: images of 8 to 64 pixels a side, thousands of them, minutes on a CPU.
    When it hurts: photographs at full size, for which a pretrained network is the better start.
    """

    kind: ClassVar[str] = "classifier"
    implementation = ".classifier:Classifier"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {
            "kind": "adamw",
            "lr": 3e-3,
            "weight_decay": 0.05,
            "max_grad_norm": 1.0,
        }
    }

    widths: list[Annotated[int, Field(ge=8, multiple_of=8)]] = Field(
        default_factory=lambda: [16, 32], min_length=1
    )
    """Channels of the blocks: two blocks of every width."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of the last layer that is dropped in training."""

    def draws(self) -> bool:
        """Returns whether dropout is used."""
        return self.dropout > 0


class ConvClassifierConfig(ConvolutionalClassifierConfig):
    """A small network in which every kind of convolution is trained, for images of one size.

    Three 3 x 3 convolutions, the second with stride 2, which halves height and width; a
    transposed 2 x 2 convolution that doubles them again; and a skip connection from the first
    convolution, whose channels are concatenated. The mean over all pixels goes into one linear
    layer.

    When it helps: comparing algorithms for convolutions in a training, on images of 16 to 64
    pixels. When it hurts: tasks that need more than three convolutions; ``classifier`` is deeper.
    """

    kind: ClassVar[str] = "conv_classifier"
    implementation = ".conv_classifier:ConvClassifier"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
    }

    width: Annotated[int, Field(ge=8, multiple_of=8)] = 32
    """Channels of the first convolution; the next two have twice as many."""
    norm: Literal["group", "batch"] = "group"
    """Group norm depends on one image alone. Batch norm depends on the batch, and can be merged
    into the convolutions of a trained model (``merged_conv_bn``).
    """


class MlpConfig(ImageClassifierConfig):
    """Fully connected layers on the pixels of an image.

    The defaults are the network that is often used for MNIST: 512 and 256 features, tanh, no
    biases.

    When it helps: a first result in seconds, on small images whose objects are centred.
    When it hurts: every other image; a network of convolutions needs fewer parameters.
    """

    kind: ClassVar[str] = "mlp"
    implementation = ".mlp:FullyConnected"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "sgd", "lr": 0.1}
    }

    widths: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [512, 256]
    )
    """Features of the layers between the pixels and the classes."""
    activation: Literal["tanh", "relu"] = "tanh"
    """The nonlinearity after each of them."""
    bias: bool = False
    """Whether layers add a bias."""


DIGITS = 1_797
DIGITS_SIDE = 8
DIGITS_CLASSES = 10


def outline_of_images(
    batch_size: int, channels: int, side: int, classes: int, samples: int | None = None
) -> SourceOutline:
    """Returns the outline of labelled images."""
    image = TensorOutline((batch_size, channels, side, side))
    label = TensorOutline((batch_size,), "int64")
    return SourceOutline(
        {"image": image, "label": label},
        sizes={"classes": classes},
        epoch_samples=samples,
    )


class DigitsConfig(DatasetConfig):
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn (UCI, Alpaydin and
    Kaynak 1998).

    The first ones are held out. They were written by other people than the rest, which makes them
    harder than a random choice would be.
    """

    kind: ClassVar[str] = "digits"
    implementation = ".digits:Digits"
    provides: ClassVar[str] = "labelled_images"
    in_memory: ClassVar[bool] = True

    held_out: Annotated[int, Field(ge=1, le=1000)] = 360
    """How many images only evaluation sees."""
    scale: Annotated[int, Field(ge=1, le=8)] = 1
    """Factor by which height and width are enlarged, with bilinear interpolation."""

    def outline(self, batch_size: int) -> SourceOutline:
        """Returns the shapes of the images."""
        side = DIGITS_SIDE * self.scale
        return outline_of_images(
            batch_size, 1, side, DIGITS_CLASSES, DIGITS - self.held_out
        )


class ImageFolderConfig(DatasetConfig):
    """Any folder of images with one subfolder for each class.

    Which images are held out follows from their names alone: more images may come, and none
    changes sides.
    """

    kind: ClassVar[str] = "image_folder"
    implementation = ".image_folder:ImageFolder"
    provides: ClassVar[str] = "labelled_images"

    folder: RecipePath
    """The folder, relative to the recipe; its subfolders' names, sorted, are the classes."""
    side: Annotated[int, Field(ge=4, le=1024)] = 32
    """Pixels; every image is scaled to this height and width."""
    grey: bool = False
    """Whether images are turned to one grey channel instead of three colours."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the images that only evaluation sees, about."""

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of the images, if the folder is there to count its classes."""
        folder = Path(self.folder)
        if not folder.is_dir():
            return None
        classes = [
            path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."
        ]
        return outline_of_images(
            batch_size, 1 if self.grey else 3, self.side, max(1, len(classes))
        )
