"""Every backend against a float64 reference, in all directions; and what they refuse."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import correlate
from torch.nn import functional as F  # noqa: N812

from runner.api import UsageError
from runner.plugins.vision.convolution.function import convolve
from runner.plugins.vision.convolution.geometry import ConvGeometry
from runner.plugins.vision.convolution.key import DIRECTIONS, ConvKey, layout_of
from runner.plugins.vision.convolution.native import convolution
from runner.plugins.vision.convolution.registry import BACKENDS, NATIVE

FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SMALL = st.integers(1, 3)
PAIR = st.tuples(SMALL, SMALL)


@st.composite
def problems(draw):
    """Returns sizes of input and weight, and a geometry with which they can be convolved."""
    groups = draw(SMALL)
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (1, 3), (2, 4)]))
    is_simple = draw(st.booleans())
    stride = (1, 1) if is_simple else draw(PAIR)
    dilation = (1, 1) if is_simple else draw(PAIR)
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    geometry = ConvGeometry(stride, padding, dilation, groups)
    # The smallest image that the kernel covers, and up to six pixels more.
    lengths = [
        max(1, extent - 2 * pad) + draw(st.integers(0, 6))
        for extent, pad in zip(geometry.extent(kernel), padding, strict=True)
    ]
    inner = draw(st.integers(1, 5))
    outer = groups * draw(st.integers(1, 5))
    x_size = (draw(SMALL), groups * inner, *lengths)
    w_size = (outer, inner, *kernel)
    if draw(st.booleans()):
        return x_size, w_size, geometry
    size = geometry.output_size(lengths, kernel)
    return (x_size[0], outer, *size), w_size, geometry.restoring(lengths, kernel)


def reference(x, w, geometry, gradient):
    """Returns output and gradients by torch in float64."""
    x, w = (tensor.detach().double().contiguous().requires_grad_() for tensor in (x, w))
    if geometry.transposed:
        y = F.conv_transpose2d(
            x, w, None, geometry.stride, geometry.padding, geometry.output_padding, geometry.groups, geometry.dilation
        )
    else:
        y = F.conv2d(x, w, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    return y.detach(), *torch.autograd.grad(y, (x, w), gradient.double())


def relative_error(result, expected):
    norm = expected.norm()
    return ((result.double() - expected).norm() / norm).item() if norm else result.double().norm().item()


def inputs_of(problem, dtype, layout, seed=0):
    x_size, w_size, geometry = problem
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (x_size, w_size))
    key = ConvKey.of(x, w, geometry)
    gradient = torch.randn(key.y_size, generator=generator, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=layout).requires_grad_(), w.requires_grad_(), gradient


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(DTYPES), st.sampled_from(FORMATS))
def test_every_backend_computes_what_torch_does_in_float64(problem, dtype, layout):
    geometry = problem[2]
    x, w, gradient = inputs_of(problem, dtype, layout)
    expected = reference(x, w, geometry, gradient)
    key = ConvKey.of(x, w, geometry)
    baseline = convolve(x, w, geometry, lambda _: NATIVE)
    for backend in BACKENDS.values():
        if backend.refusal(key) is not None:
            continue
        needs = []

        def workspace(count, device, needs=needs):
            needs.append(count)
            return torch.full((count,), 255, dtype=torch.uint8, device=device)

        y = convolve(x, w, geometry, lambda _, backend=backend: backend, workspace=workspace)
        assert layout_of(y) == layout_of(baseline)
        results = (y.detach(), *torch.autograd.grad(y, (x, w), gradient))
        for direction, result, true in zip(DIRECTIONS, results, expected, strict=True):
            error = relative_error(result, true)
            assert error <= backend.tolerance(key), (backend.name, direction, key)
        predicted = [backend.workspace_bytes(key.towards(direction)) for direction in DIRECTIONS]
        if needs:
            assert needs == predicted


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if "cpu" in backend.devices])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_function(name, transposed):
    geometry = ConvGeometry(padding=(1, 1), groups=2)
    problem = (2, 4, 5, 4), (4 if transposed else 6, 2, 3, 3), geometry._replace(transposed=transposed)
    x, w, _ = inputs_of(problem, torch.float64, torch.contiguous_format)
    bias = torch.zeros(ConvKey.of(x, w, problem[2]).k, dtype=torch.float64, requires_grad=True)
    assert BACKENDS[name].refusal(ConvKey.of(x, w, problem[2])) is None
    assert torch.autograd.gradcheck(
        lambda *args: convolve(*args[:2], problem[2], lambda _: BACKENDS[name], args[2]), (x, w, bias)
    )


def random_geometry(generator):
    """Returns sizes and a geometry, of which many are impossible."""

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    groups = number(1, 3)
    geometry = ConvGeometry(
        (number(1, 4), number(1, 4)), (number(0, 3), number(0, 3)), (number(1, 3), number(1, 3)), groups
    )
    return (number(1, 12), number(1, 12)), (number(1, 7), number(1, 7)), geometry


def test_output_sizes_are_those_of_torch():
    """Transposed convolutions restore the input's size; what torch refuses has a reason."""
    generator = torch.Generator().manual_seed(0)
    possible = 0
    for _ in range(1000):
        size, kernel, geometry = random_geometry(generator)
        x_size = (1, geometry.groups, *size)
        w_size = (geometry.groups, 1, *kernel)
        x, w = torch.empty(x_size, device="meta"), torch.empty(w_size, device="meta")
        arguments = (None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        problem = geometry.problem(x_size, w_size)
        if problem is not None:
            assert "pixels" in problem
            with pytest.raises(RuntimeError):
                F.conv2d(torch.empty(x_size), torch.empty(w_size), *arguments)
            continue
        possible += 1
        y = F.conv2d(x, w, *arguments)
        assert y.shape[2:] == geometry.output_size(size, kernel)
        back = geometry.restoring(size, kernel)
        # Torch's limit: less than the stride or the dilation. A kernel may leave out more rows than that at the end.
        if back.problem(y.shape, w_size) is None:
            restored = F.conv_transpose2d(
                y, w, None, back.stride, back.padding, back.output_padding, back.groups, back.dilation
            )
            assert restored.shape[2:] == size == back.output_size(y.shape[2:], kernel)
    assert possible >= 500


def test_the_reference_is_that_of_scipy():
    """A second opinion on what a convolution is."""
    x, w, _ = inputs_of(((2, 3, 9, 8), (4, 3, 3, 2), ConvGeometry()), torch.float64, torch.contiguous_format)
    y = NATIVE.forward(x, w, ConvGeometry()).detach()
    for sample, channel in itertools.product(range(2), range(4)):
        planes = zip(x[sample].detach().numpy(), w[channel].detach().numpy(), strict=True)
        expected = sum(correlate(image, kernel, "valid") for image, kernel in planes)
        torch.testing.assert_close(y[sample, channel], torch.from_numpy(expected))


IMPOSSIBLE = {
    "at least 1": (ConvGeometry(stride=(0, 1)), (1, 3, 8, 8), (4, 3, 3, 3)),
    "dilation": (ConvGeometry(dilation=(1, 0)), (1, 3, 8, 8), (4, 3, 3, 3)),
    "not be negative": (ConvGeometry(padding=(0, -1)), (1, 3, 8, 8), (4, 3, 3, 3)),
    "groups": (ConvGeometry(groups=0), (1, 3, 8, 8), (4, 3, 3, 3)),
    "made for 6": (ConvGeometry(groups=2), (1, 3, 8, 8), (4, 3, 3, 3)),
    "only a transposed": (ConvGeometry(output_padding=(1, 0)), (1, 3, 8, 8), (4, 3, 3, 3)),
    "smaller than the stride": (ConvGeometry(transposed=True, output_padding=(1, 0)), (1, 4, 8, 8), (4, 3, 3, 3)),
    "input should have 4": (ConvGeometry(), (3, 8), (4, 3, 3, 3)),
    "weight should have 4": (ConvGeometry(), (1, 3, 8, 8), (3, 3)),
    "0 x 6 pixels": (ConvGeometry(), (1, 3, 2, 8), (4, 3, 3, 3)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_an_impossible_convolution_is_refused_in_one_line(reason, backend):
    geometry, x_size, w_size = IMPOSSIBLE[reason]
    with pytest.raises(UsageError, match=f"^convolution: .*{reason}.*$"):
        convolve(torch.rand(x_size), torch.rand(w_size), geometry, lambda key: BACKENDS[backend])


def test_types_that_differ_are_refused():
    with pytest.raises(UsageError, match=r"the input is torch.float32, the weight torch.float64"):
        convolve(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3).double(), ConvGeometry(), lambda key: BACKENDS["fft"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("geometry", [ConvGeometry(stride=(2, 2)), ConvGeometry(dilation=(2, 2)), ConvGeometry()])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_a_backend_computes_the_convolution_or_refuses_it(backend, geometry, kernel):
    x = torch.rand(2, 3, 9, 9, requires_grad=True)
    w = torch.rand(4, 3, kernel, kernel, requires_grad=True)
    key = ConvKey.of(x, w, geometry)
    if BACKENDS[backend].refusal(key) is not None:
        with pytest.raises(UsageError, match=f"'{backend}'"):
            convolve(x, w, geometry, lambda key: BACKENDS[backend])
        return
    y = convolve(x, w, geometry, lambda key: BACKENDS[backend])
    torch.testing.assert_close(y, convolution(x, w, *geometry), rtol=1e-4, atol=1e-4)
