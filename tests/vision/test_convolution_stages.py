"""Stages for convolutions, and what other stages make of layers that convolve through a slot."""

import copy
import threading

import pytest
import torch
from running import forked, tiny, train_here
from torch import nn

from runner.api import RunnerError, UsageError
from runner.plugins.inference.export import ExportConfig
from runner.plugins.inference.merged_conv_bn import MergedConvBnConfig
from runner.plugins.vision.conv_classifier import SkipNet
from runner.plugins.vision.convolution.function import convolve
from runner.plugins.vision.convolution.geometry import ConvGeometry
from runner.plugins.vision.convolution.key import DIRECTIONS, ConvKey
from runner.plugins.vision.convolution.modules import Convolution, TransposedConvolution
from runner.plugins.vision.convolution.registry import BACKENDS, NATIVE, backend_named, legal_backends, refusals
from runner.plugins.vision.convolution.workspace import GrowingWorkspace, new_workspace
from runner.training.pipeline import assemble
from runner.training.step import Step

PADDED = ConvGeometry(padding=(1, 1))
WITH_BUFFERS = ["im2col", "winograd"]


def pipeline(*sets, name="conv_classifier"):
    return assemble(tiny(name, *sets))


def trained(*sets, updates=3):
    """Parameters after a few updates, by name."""
    made = pipeline(*sets)
    step = Step(made)
    for _ in range(updates):
        step()
    return {name: tensor.clone() for name, tensor in made.learner.module.state_dict().items()}


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = [
    (Convolution, nn.Conv2d, {"padding": 1, "stride": 2, "bias": False}),
    (Convolution, nn.Conv2d, {"padding": (0, 1), "dilation": 2, "groups": 2}),
    (TransposedConvolution, nn.ConvTranspose2d, {"stride": 2, "output_padding": 1}),
]


@pytest.mark.parametrize(("layer", "standard", "settings"), LAYERS)
def test_a_layer_is_that_of_torch_to_the_bit(layer, standard, settings):
    torch.manual_seed(0)
    expected = standard(4, 6, 3, **settings)
    torch.manual_seed(0)
    actual = layer(4, 6, 3, **settings)
    assert expected.state_dict().keys() == actual.state_dict().keys()
    x = torch.randn(2, 4, 9, 8)
    outputs = [module(x) for module in (expected, actual)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(expected.weight.grad, actual.weight.grad)


@pytest.mark.parametrize("settings", [{"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_a_layer_pads_with_numbers_of_zeros(settings):
    with pytest.raises(ValueError, match="Convolution: padding"):
        Convolution(1, 1, 3, **settings)


def test_a_transposed_layer_has_one_output_size():
    with pytest.raises(ValueError, match="output_padding instead"):
        TransposedConvolution(1, 1, 2, 2)(torch.zeros(1, 1, 2, 2), [5, 5])


@pytest.mark.parametrize("name", ["conv_classifier", "digits_classifier"])
def test_a_copy_of_the_network_does_not_copy_the_learner(name):
    learner = pipeline(name=name).learner
    network = copy.deepcopy(learner.module)
    convolutions = [layer for layer in network.modules() if isinstance(layer, Convolution)]
    originals = [layer for layer in learner.module.modules() if isinstance(layer, Convolution)]
    assert [layer.convolve for layer in convolutions] == [layer.convolve for layer in originals]
    assert convolutions


@pytest.mark.parametrize("size", [(16, 16), (15, 9), (8, 33)])
def test_images_of_any_size_become_logits(size):
    assert SkipNet((3, *size), 8, 5)(torch.rand(2, 3, *size)).shape == (2, 5)


# --- choices ----------------------------------------------------------------------------------------------------------


def test_directions_use_the_backends_that_are_chosen_for_them():
    x, w = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    names = dict(zip(DIRECTIONS, ("winograd", "im2col", "fft"), strict=True))
    calls = []

    def choose(key):
        calls.append((key.direction, names[key.direction]))
        return BACKENDS[names[key.direction]]

    y = convolve(x, w, PADDED, choose)
    assert calls == list(names.items())
    torch.testing.assert_close(y, nn.functional.conv2d(x, w, padding=1), rtol=1e-5, atol=1e-5)
    assert y.grad_fn.name() == "_ConvolutionBackward"
    assert [backend.name for backend in y.grad_fn.backends] == list(names.values())


@pytest.mark.parametrize(("needs_data", "needs_weight"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", ["im2col", "channels_last"])
def test_only_gradients_that_are_needed_are_computed(name, needs_data, needs_weight):
    x = torch.randn(2, 3, 6, 6, requires_grad=needs_data)
    w = torch.randn(4, 3, 3, 3, requires_grad=needs_weight)
    y = convolve(x, w, PADDED, lambda _: BACKENDS[name])
    expected = nn.functional.conv2d(x, w, padding=1)
    torch.testing.assert_close(y, expected)
    for tensor in [tensor for tensor in (x, w) if tensor.requires_grad]:
        gradients = [torch.autograd.grad(z.square().sum(), tensor, retain_graph=True)[0] for z in (y, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert y.requires_grad == (needs_data or needs_weight)


def test_native_keeps_the_bits_and_the_second_derivative_of_torch():
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    y = convolve(x, w, PADDED, lambda _: NATIVE)
    assert torch.equal(y, nn.functional.conv2d(x, w, padding=1))
    (gradient,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), w)[0].isfinite().all()


@pytest.mark.parametrize("name", ["im2col", "winograd", "fft", "channels_last", "onednn_off"])
def test_a_second_derivative_is_refused_in_one_line(name):
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    y = convolve(torch.randn(2, 3, 6, 6), w, PADDED, lambda _: BACKENDS[name])
    with pytest.raises(RunnerError, match=f"a gradient of a gradient needs the backend 'native'.*{name}"):
        torch.autograd.grad(y.square().sum(), w, create_graph=True)


def test_autocast_chooses_for_the_type_that_it_computes_in():
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    types = []

    def choose(key):
        types.append(key.dtype)
        return BACKENDS["im2col"]

    with torch.autocast("cpu", torch.bfloat16):
        y = convolve(x, w, PADDED, choose, torch.zeros(4))
        expected = nn.functional.conv2d(x, w, torch.zeros(4), padding=1)
    assert {*types} == {"bfloat16"}
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert torch.autograd.grad(y.float().sum(), w)[0].dtype == torch.float32


def key_of(x_size=(2, 4, 8, 8), w_size=(4, 4, 3, 3), geometry=PADDED, dtype=torch.float32):
    return ConvKey.of(torch.empty(x_size, dtype=dtype), torch.empty(w_size, dtype=dtype), geometry)


REFUSED = [
    ("fft", {"geometry": ConvGeometry((2, 2))}, "stride 1 and dilation 1"),
    ("fft", {"dtype": torch.bfloat16}, "not bfloat16"),
    ("winograd", {"w_size": (4, 4, 5, 5)}, "kernels of 3 x 3, not 5 x 5"),
    ("winograd", {"dtype": torch.float16}, "not float16"),
    ("cudnn", {}, "on cuda, not on 'cpu'"),
    ("native", {"w_size": (4, 4, 11, 11)}, "0 x 0 pixels"),
    ("im2col", {"geometry": ConvGeometry(groups=3), "x_size": (2, 12, 8, 8)}, "3 does not divide 4"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED)
def test_what_a_backend_cannot_compute_has_a_reason(name, settings, reason):
    message = BACKENDS[name].refusal(key_of(**settings))
    assert message is not None
    assert reason in message
    assert "\n" not in message


IMPOSSIBLE = [
    (ConvGeometry(), (2, 3, 8, 8), "3 channels, the weight is made for 4"),
    (ConvGeometry(transposed=True), (2, 3, 8, 8), "3 channels, the weight is made for 4"),
    (ConvGeometry(), (2, 4, 8), "4 dimensions, got 3"),
    (ConvGeometry(), (2, 4, 0, 8), "sizes should be positive"),
    (ConvGeometry((0, 1)), (2, 4, 8, 8), "stride: (0, 1) should be at least 1"),
    (ConvGeometry(dilation=(1, 0)), (2, 4, 8, 8), "dilation: (1, 0) should be at least 1"),
    (ConvGeometry(padding=(-1, 0)), (2, 4, 8, 8), "padding: (-1, 0) should not be negative"),
    (ConvGeometry(output_padding=(1, 1)), (2, 4, 8, 8), "only a transposed"),
    (ConvGeometry(transposed=True, output_padding=(1, 1)), (2, 4, 8, 8), "smaller than the stride"),
    (ConvGeometry(groups=0), (2, 4, 8, 8), "groups: 0 should be at least 1"),
    (ConvGeometry((9, 9), dilation=(4, 4)), (2, 4, 8, 8), "0 x 0 pixels"),
]


@pytest.mark.parametrize(("geometry", "x_size", "reason"), IMPOSSIBLE)
def test_what_is_impossible_has_a_reason(geometry, x_size, reason):
    message = geometry.problem(x_size, (4, 4, 3, 3))
    assert message is not None
    assert reason in message
    assert "\n" not in message


def test_backends_are_listed_for_a_key():
    key = key_of()
    names = [backend.name for backend in legal_backends(key)]
    assert names == ["native", "channels_last", "im2col", "fft", "winograd", "onednn_off"]
    assert {*refusals(key)} == {*BACKENDS} - {*names}
    with pytest.raises(UsageError, match="unknown convolution backend 'magic': use one of native"):
        backend_named("magic")


def test_a_key_is_read_back_from_its_text():
    keys = [key_of(), key_of(dtype=torch.bfloat16).towards("backward_weight")]
    transposed = ConvGeometry((2, 2), groups=2, transposed=True, output_padding=(1, 0))
    keys.append(key_of((1, 4, 5, 5), (4, 2, 2, 2), transposed))
    assert [ConvKey.parse(str(key)) for key in keys] == keys
    with pytest.raises(ValueError, match="the key of a convolution has"):
        ConvKey.parse("n=1 c=2")


def test_a_key_differs_wherever_time_or_bits_may_differ(monkeypatch):
    x, w = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    keys = [
        ConvKey.of(x, w, PADDED),
        ConvKey.of(x.double(), w.double(), PADDED),
        ConvKey.of(x.contiguous(memory_format=torch.channels_last), w, PADDED),
        ConvKey.of(x.transpose(2, 3), w, PADDED),
        ConvKey.of(x, w, PADDED).towards("backward_data"),
        ConvKey.of(x, w, PADDED._replace(dilation=(2, 2), padding=(2, 2))),
        ConvKey.of(x, w, PADDED._replace(transposed=True)),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(ConvKey.of(x, w, PADDED))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        keys.append(ConvKey.of(x, w, PADDED))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        keys.append(ConvKey.of(x, w, PADDED))
    assert len({*keys}) == len({*map(str, keys)}) == len(keys)


def test_onednn_is_on_again_when_the_last_thread_leaves():
    settings = BACKENDS["onednn_off"].settings
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with settings():
            inside.set()
            leave.wait(10)

    assert torch.backends.mkldnn.enabled
    thread = threading.Thread(target=stay)
    with settings():
        thread.start()
        inside.wait(10)
    assert not torch.backends.mkldnn.enabled
    leave.set()
    thread.join()
    assert torch.backends.mkldnn.enabled


# --- the workspace ----------------------------------------------------------------------------------------------------


def test_the_buffer_has_the_size_of_the_largest_need():
    pool, needs = GrowingWorkspace(), []

    def counted(count, device):
        needs.append(count)
        return pool(count, device)

    for side in range(5, 105):
        x, w = torch.randn(1, 2, side % 23 + 3, side % 17 + 3), torch.randn(3, 2, 3, 3)
        convolve(x, w, PADDED, lambda _: BACKENDS[WITH_BUFFERS[len(needs) % 2]], workspace=counted)
    assert len(needs) == pool.calls == 100
    assert pool.largest_bytes == max(needs)


def results(workspace, number, calls):
    """Outputs and gradients of one thread's convolutions, which are those of another thread with other numbers."""
    generator = torch.Generator().manual_seed(number)
    x, w = (torch.randn(size, generator=generator).requires_grad_() for size in ((4, 8, 12, 12), (8, 8, 3, 3)))
    tensors = []
    for call in range(calls):
        backend = BACKENDS[WITH_BUFFERS[call % len(WITH_BUFFERS)]]
        y = convolve(x, w, PADDED, lambda _, backend=backend: backend, workspace=workspace)
        tensors += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]
    return tensors


def differences(workspace, calls):
    """Tensors of four threads that differ from those without threads and without a pool."""
    outputs = {}
    threads = [
        threading.Thread(target=lambda number=number: outputs.update({number: results(workspace, number, calls)}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {number: results(new_workspace, number, len(WITH_BUFFERS)) for number in range(4)}
    pairs = [
        (tensor, expected[number][index % len(expected[number])])
        for number, tensors in outputs.items()
        for index, tensor in enumerate(tensors)
    ]
    assert len(pairs) == 4 * 3 * calls
    return sum(not torch.equal(*pair) for pair in pairs)


def test_threads_do_not_share_a_buffer():
    assert differences(GrowingWorkspace(), calls=200) == 0


class SharedWorkspace(GrowingWorkspace):
    """A pool whose threads share one buffer, which is wrong."""

    def __init__(self):
        super().__init__()
        self._local = type("NotLocal", (), {})()


def test_a_buffer_that_threads_share_is_noticed():
    workspace = SharedWorkspace()
    assert any(differences(workspace, calls=30) for _ in range(10))


def test_the_backward_pass_reads_no_buffer():
    """A buffer that is overwritten after every convolution changes nothing."""

    pool = GrowingWorkspace()
    x, first, second = (torch.randn(size) for size in ((2, 4, 8, 8), (4, 4, 3, 3), (4, 4, 3, 3)))
    gradients = []
    for workspace in (new_workspace, pool):
        weights = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        y = x
        for weight in weights:
            y = convolve(y, weight, PADDED, lambda _: BACKENDS["im2col"], workspace=workspace)
        if workspace is pool:
            pool(pool.largest_bytes, x.device).fill_(255)
        gradients.append(torch.autograd.grad(y.square().sum(), weights))
    assert all(map(torch.equal, *gradients))


# --- stages -----------------------------------------------------------------------------------------------------------


def test_a_pool_changes_no_bit_of_a_training():
    backend = "optimization.conv_backend={forward: winograd, backward_data: im2col, backward_weight: im2col}"
    plain, pooled = trained(backend), trained(backend, "optimization.workspace_pool=on")
    assert all(torch.equal(plain[name], pooled[name]) for name in plain)


@pytest.mark.parametrize("name", ["im2col", "channels_last", "fft", "winograd", "onednn_off"])
def test_a_training_by_one_backend_is_the_baseline_up_to_rounding(name):
    backend = f"optimization.conv_backend={{forward: {name}, backward_data: {name}, backward_weight: {name}}}"
    plain, other = trained(), trained(backend)
    assert any(not torch.equal(plain[key], other[key]) for key in plain)
    for key in plain:
        torch.testing.assert_close(other[key], plain[key], rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("migrated_workspace")
def test_layers_that_a_backend_cannot_compute_are_reported():
    backends = "{forward: winograd, backward_data: native, backward_weight: native}"
    reports = train_here("conv_classifier", f"optimization.conv_backend={backends}").stages
    report = next(report for report in reports if report.kind == "conv_backend")
    assert report.active
    (note,) = report.notes
    assert note.startswith("winograd: 2 kinds of layers are computed by 'native': 'winograd' computes kernels of 3 x 3")


@pytest.mark.usefixtures("migrated_workspace")
def test_native_in_all_directions_is_inactive_and_a_pool_alone_is_idle():
    native = "optimization.conv_backend={forward: native, backward_data: native, backward_weight: native}"
    reports = train_here("conv_classifier", native, "optimization.workspace_pool=on").stages
    reasons = {report.kind: report.reason for report in reports}
    assert reasons["conv_backend"] == "all directions are 'native'"
    assert reasons["workspace_pool"] == "the learner never calls its slot 'conv_workspace'"


WRONG = [
    ("optimization.conv_backend={forward: cudnn}", "conv_backend: forward: 'cudnn' computes on cuda, not on 'cpu'"),
    ("optimization.conv_backend={forward: wingrad}", "did you mean 'winograd'"),
    ("optimization.conv_backend.stride=2", "conv_backend.stride: unknown key"),
    ("data.scale=0", "data.scale"),
    ("model.width=9", "model.width"),
]


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(("setting", "message"), WRONG)
def test_a_wrong_setting_is_one_message_and_exit_code_2(setting, message, tmp_path):
    child = forked("run", "conv_classifier", "-q", setting)
    assert child.returncode == 2
    assert message in child.stderr
    assert "Traceback" not in child.stderr


def trained_with_batch_norm():
    made = pipeline("model.norm=batch")
    step = Step(made)
    for _ in range(5):
        step()
    return made


def test_batch_norm_is_merged_into_convolutions():
    made = trained_with_batch_norm()
    images = torch.rand(8, 1, 8, 8)
    expected = made.learner.predict(images)
    names = made.learner.module.state_dict().keys()
    made.attach_to_learnt({"merged_conv_bn": MergedConvBnConfig()})
    norms = [layer for layer in made.learner.module.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.eps = 1e9  # which a norm that is merged reads no more
    actual = made.learner.predict(images)
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert made.learner.module.state_dict().keys() == names
    assert made.reports["merged_conv_bn"].notes == ["4 batch norms are merged into convolutions"]


def test_merged_weights_follow_the_parameters():
    """Those of another checkpoint that is loaded later, and of a training that continues."""
    merged, plain = trained_with_batch_norm(), pipeline("model.norm=batch")
    merged.attach_to_learnt({"merged_conv_bn": MergedConvBnConfig()})
    images = torch.rand(8, 1, 8, 8)
    weights = copy.deepcopy(plain.learner.module.state_dict())
    assert not torch.equal(merged.learner.predict(images), plain.learner.predict(images))
    merged.learner.module.load_state_dict(weights)
    torch.testing.assert_close(merged.learner.predict(images), plain.learner.predict(images), rtol=1e-4, atol=1e-5)
    merged.slots.update({"image": images, "label": torch.arange(8)}, {}, merged.progress)
    plain.learner.module.load_state_dict(merged.learner.module.state_dict())
    assert not torch.equal(plain.learner.module.head.weight, weights["head.weight"])
    torch.testing.assert_close(merged.learner.predict(images), plain.learner.predict(images), rtol=1e-4, atol=1e-5)


def test_a_network_with_batch_norm_is_exported():
    """Batch norm has a counter without dimensions."""
    made = trained_with_batch_norm()
    images = torch.rand(4, 1, 8, 8)
    made.learner.module.eval()
    expected = made.learner.predict(images)
    made.attach_to_learnt({"export": ExportConfig()})
    torch.testing.assert_close(made.learner.predict(images), expected, rtol=1e-4, atol=1e-5)


def test_group_norm_is_not_merged():
    made = pipeline()
    with pytest.raises(UsageError, match="has no batch norm, and its group norm depends on each image"):
        made.attach_to_learnt({"merged_conv_bn": MergedConvBnConfig()})


class Branches(nn.Module):
    """Batch norms of which only the last can be merged."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Conv2d(2, 2, 1)
        self.first = nn.BatchNorm2d(2)
        self.second = nn.ConvTranspose2d(2, 4, 2, groups=2)
        self.third = nn.BatchNorm2d(4)
        self.last = nn.ConvTranspose2d(4, 6, 2, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.loose = nn.BatchNorm2d(6, track_running_stats=False)

    def forward(self, x):
        y = self.shared(x)
        return self.loose(self.norm(self.last(self.third(self.second(self.first(y) + y)))))


def test_only_what_one_norm_reads_is_merged():
    made = pipeline("model.norm=batch")
    network = Branches().train()
    for _ in range(3):
        network(torch.randn(4, 2, 5, 5))
    made.learner.module = made.learner.model.module = network.eval()
    x = torch.randn(3, 2, 5, 5)
    expected = network(x)
    made.attach_to_learnt({"merged_conv_bn": MergedConvBnConfig()})
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-4)
    merged = {name for name, layer in network.named_children() if "forward" in vars(layer)}
    assert merged == {"last", "norm"}
