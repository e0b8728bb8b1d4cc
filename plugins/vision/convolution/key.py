"""Keys that identify a convolution, with all that its time and its bits depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .geometry import ConvGeometry, Pair

Direction = Literal["forward", "backward_data", "backward_weight"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward_data", "backward_weight")
Layout = Literal["contiguous", "channels_last", "strided"]


@dataclass(frozen=True)
class ConvKey:
    """Identifies a convolution in one direction, on a machine with its settings.

    Attributes:
        n: Samples of the batch.
        c: Channels of the input.
        h: Height of the input.
        w: Width of the input.
        k: Channels of the output.
        kernel: Height and width of the kernel.
        stride: See ``ConvGeometry``.
        padding: See ``ConvGeometry``.
        dilation: See ``ConvGeometry``.
        groups: See ``ConvGeometry``.
        transposed: See ``ConvGeometry``.
        output_padding: See ``ConvGeometry``.
        dtype: Type of input and weight, such as ``float32``.
        layout: Memory format of the input.
        direction: What is computed: the output, or the gradient of the input or of the weight.
        device: ``cpu``, or ``cuda`` with the name of the GPU.
        threads: Threads that torch uses on a CPU.
        math: Arithmetic that convolutions and products may use, and whether algorithms have to be
            deterministic.
        library: Versions of torch and of the library with its kernels.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    transposed: bool
    output_padding: Pair
    dtype: str
    layout: Layout
    direction: Direction
    device: str
    threads: int
    math: str
    library: str

    @classmethod
    def of(
        cls,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        direction: Direction = "forward",
    ) -> ConvKey:
        """Returns the key of the convolution of a tensor with a weight."""
        return keys_of(x, w, geometry)[DIRECTIONS.index(direction)]

    def towards(self, direction: Direction) -> ConvKey:
        """Returns the key of the same convolution in another direction."""
        return replace(self, direction=direction)

    @property
    def geometry(self) -> ConvGeometry:
        """Returns the geometry."""
        return ConvGeometry(
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
        )

    @property
    def device_type(self) -> str:
        """Returns ``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]

    @property
    def x_size(self) -> tuple[int, int, int, int]:
        """Returns the sizes of the input."""
        return self.n, self.c, self.h, self.w

    @property
    def w_size(self) -> tuple[int, int, int, int]:
        """Returns the sizes of the weight."""
        # Torch stores the weight of a transposed convolution with its input channels first.
        outer, inner = (self.c, self.k) if self.transposed else (self.k, self.c)
        return outer, inner // self.groups, *self.kernel

    @property
    def y_size(self) -> tuple[int, int, int, int]:
        """Returns the sizes of the output."""
        return self.n, self.k, *self.geometry.output_size((self.h, self.w), self.kernel)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the type as an object of torch."""
        return cast("torch.dtype", getattr(torch, self.dtype))

    @property
    def itemsize(self) -> int:
        """Returns the bytes of a number."""
        return self.torch_dtype.itemsize

    @property
    def nominal_flop(self) -> int:
        """Multiplications and additions of the definition; Winograd and FFT need fewer."""
        pixels = self.h * self.w if self.transposed else self.y_size[2] * self.y_size[3]
        outer, inner, height, width = self.w_size
        return 2 * self.n * outer * inner * height * width * pixels

    @property
    def least_bytes(self) -> int:
        """Bytes that are read and written at least: input, weight and output once each."""
        sizes = (self.x_size, self.w_size, self.y_size)
        return self.itemsize * sum(a * b * c * d for a, b, c, d in sizes)

    def __str__(self) -> str:
        return " ".join(
            f"{name}={_text(value)}" for name, value in asdict(self).items()
        )

    @classmethod
    def parse(cls, text: str) -> ConvKey:
        """Reads what ``str`` returns.

        Raises:
            ValueError: The text is not that of a key.
        """
        # A value contains no spaces: ``str`` replaces them.
        values = dict(entry.partition("=")[::2] for entry in text.split(" "))
        expected = [field.name for field in fields(cls)]
        if list(values) != expected:
            raise ValueError(
                f"the key of a convolution has {', '.join(expected)}; got {text!r:.200}"
            )
        return cls(
            **{
                field.name: _value(str(field.type), values[field.name])
                for field in fields(cls)
            }
        )


def keys_of(
    x: Tensor, w: Tensor, geometry: ConvGeometry
) -> tuple[ConvKey, ConvKey, ConvKey]:
    """Returns the keys of the convolution of a tensor with a weight, in the order of
    ``DIRECTIONS``.
    """
    device = x.device
    threads = torch.get_num_threads()
    return _keys(
        x.shape,
        w.shape,
        geometry,
        x.dtype,
        layout_of(x),
        device,
        threads,
        math_mode(device.type),
    )


# Making a key takes longer than a small convolution.
@lru_cache(maxsize=4096)
def _keys(
    x_size: tuple[int, ...],
    w_size: tuple[int, ...],
    geometry: ConvGeometry,
    dtype: torch.dtype,
    layout: Layout,
    device: torch.device,
    threads: int,
    math: str,
) -> tuple[ConvKey, ConvKey, ConvKey]:
    n, c, height, width = x_size
    k = w_size[1] * geometry.groups if geometry.transposed else w_size[0]
    stride, padding, dilation, groups, transposed, output_padding = geometry
    key = ConvKey(
        n,
        c,
        height,
        width,
        k,
        (w_size[2], w_size[3]),
        stride,
        padding,
        dilation,
        groups,
        transposed,
        output_padding,
        str(dtype).removeprefix("torch."),
        layout,
        "forward",
        _device_name(device),
        threads,
        math,
        _library(device.type),
    )
    return key, key.towards("backward_data"), key.towards("backward_weight")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value).replace(" ", "_")


def _value(kind: str, text: str) -> Any:
    if kind == "Pair":
        height, width = map(int, text.split("x"))
        return height, width
    if kind == "bool":
        return bool(int(text))
    return int(text) if kind == "int" else text


def layout_of(x: Tensor) -> Layout:
    """Returns the memory format of a tensor; one that is in both formats counts as contiguous."""
    if x.is_contiguous():
        return "contiguous"
    return (
        "channels_last"
        if x.is_contiguous(memory_format=torch.channels_last)
        else "strided"
    )


def format_of(x: Tensor) -> torch.memory_format:
    """Returns the memory format in which torch returns the result for an input."""
    return (
        torch.channels_last
        if layout_of(x) == "channels_last"
        else torch.contiguous_format
    )


def math_mode(device: str) -> str:
    """Returns which arithmetic torch may use now for convolutions and products on a type of
    device.
    """
    backends: Any = torch.backends
    library = backends.cudnn if device == "cuda" else backends.mkldnn
    convolution = library.conv.fp32_precision
    # Unset means the general setting, and that is IEEE arithmetic unless it is set, too.
    if convolution == "none":
        convolution = (
            "ieee" if backends.fp32_precision == "none" else backends.fp32_precision
        )
    mode = f"{convolution}/{torch.get_float32_matmul_precision()}"
    return (
        f"{mode}/deterministic"
        if torch.are_deterministic_algorithms_enabled()
        else mode
    )


@cache
def _device_name(device: torch.device) -> str:
    return (
        f"cuda:{torch.cuda.get_device_name(device)}".replace(" ", "_")
        if device.type == "cuda"
        else device.type
    )


@cache
def _library(device: str) -> str:
    if device == "cuda":
        backends: Any = torch.backends
        return f"torch-{torch.__version__}/cudnn-{backends.cudnn.version()}"
    return f"torch-{torch.__version__}"
