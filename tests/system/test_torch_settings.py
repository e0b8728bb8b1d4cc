"""torch's settings are kept apart, all of them: a new version of torch that adds one fails here."""

import pkgutil
import types
from importlib import import_module

import pytest
import torch

from runner.system import torch_settings
from runner.system.generators import Globals

OTHER = {
    "torch.get_default_dtype": torch.float64,
    "torch.get_default_device": torch.device("meta"),
    "torch.get_num_threads": 3,
    "torch.get_deterministic_debug_mode": 1,
    "autocast dtype on cpu": torch.float16,
    "autocast dtype on cuda": torch.bfloat16,
    "torch.get_float32_matmul_precision": "medium",
    "torch.backends.cudnn.benchmark_limit": 7,
    "torch.backends.cudnn.depthwise_kernel": "native",
    "torch.backends.opt_einsum.strategy": "greedy",
    "torch.backends.quantized.engine": "onednn",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (False, True),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (False, True),
    "priority of attention kernels": [0, 1, 2, 3, 4],
    "torch.backends.cuda.preferred_linalg_library": torch._C._LinalgBackend.Cusolver,
    "torch.backends.cuda.preferred_blas_library": torch._C._BlasBackend.Cublaslt,
    "torch.backends.cuda.preferred_rocm_fa_library": torch._C._ROCmFABackend.AOTriton,
}
ONLY_ELSEWHERE = ("cpu: reduced", "opt_einsum", "depthwise_kernel", "preferred_", "fa3")
"""What a build without CUDA, or a package that is not there, does not let one change."""


def another(name, value):
    """What a setting may be that it is not."""
    if name.startswith("fp32_precision"):
        return "tf32" if value == "ieee" else "ieee"
    return not value if isinstance(value, bool) else OTHER[name]


@pytest.mark.parametrize("name", torch_settings.SETTINGS)
def test_a_setting_is_kept_apart(name):
    before, apart = torch_settings.read(), Globals()
    if before[name] is None:
        pytest.skip("it cannot be told here")
    setting = torch_settings.SETTINGS[name]
    with apart.apart():
        try:
            setting.write(another(name, before[name]))
        except (RuntimeError, AssertionError):
            setting.write(before[name])  # some complain when they have been set already
        inside = torch_settings.read()
    if inside == before:
        assert any(part in name for part in ONLY_ELSEWHERE)
        pytest.skip("it cannot be changed here")
    assert torch_settings.read() == before
    with apart.apart():
        assert torch_settings.read() == inside
    assert torch_settings.read() == before


def test_what_this_version_of_torch_lacks_is_none_and_left_alone(monkeypatch):
    missing = torch_settings.TorchSetting(lambda: torch.backends.cudnn.no_such_setting, torch.set_num_threads)
    monkeypatch.setitem(torch_settings.SETTINGS, "of another version", missing)
    found = torch_settings.read()
    assert found["of another version"] is None
    torch_settings.write(found)


def test_settings_of_precision_that_contradict_each_other_are_kept_apart():
    before, apart = torch_settings.read(), Globals()
    with apart.apart():
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        inside = torch_settings.read()
    assert inside["torch.get_float32_matmul_precision"] is None  # the older one cannot tell
    assert torch_settings.read() == before
    with apart.apart():
        assert torch_settings.read() == inside
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
        assert torch.backends.mkldnn.conv.fp32_precision == "none"  # type: ignore[attr-defined]
    assert torch_settings.read() == before


KEPT = """
_set_blas_preferred_backend _set_cpu_allow_fp16_reduced_precision_reduction
_set_cublas_allow_bf16_reduced_precision_reduction _set_cublas_allow_fp16_accumulation
_set_cublas_allow_fp16_reduced_precision_reduction _set_cublas_allow_tf32 _set_cudnn_allow_tf32 _set_cudnn_benchmark
_set_cudnn_depthwise_kernel _set_cudnn_deterministic _set_cudnn_enabled _set_default_dtype
_set_deterministic_algorithms _set_deterministic_fill_uninitialized_memory _set_float32_matmul_precision
_set_fp32_precision_setter _set_grad_enabled _set_linalg_preferred_backend _set_math_sdp_allow_fp16_bf16_reduction
_set_miopen_immediate _set_mkldnn_deterministic _set_mkldnn_enabled _set_nnpack_enabled _set_onednn_allow_tf32
_set_qengine _set_rocm_fa_preferred_backend _set_sdp_priority_order _set_sdp_use_cudnn _set_sdp_use_fa3
_set_sdp_use_flash _set_sdp_use_math _set_sdp_use_mem_efficient _set_sdp_use_overrideable
set_anomaly_enabled set_autocast_cache_enabled set_autocast_dtype set_autocast_enabled set_default_device
set_default_dtype set_deterministic_debug_mode set_float32_matmul_precision set_flush_denormal set_grad_enabled
set_num_threads set_rng_state use_deterministic_algorithms
cuda.allow_fp16_bf16_reduction_math_sdp cuda.enable_cudnn_sdp cuda.enable_flash_sdp cuda.enable_math_sdp
cuda.enable_mem_efficient_sdp cuda.preferred_blas_library cuda.preferred_linalg_library cuda.preferred_rocm_fa_library
cudnn.allow_tf32 cudnn.benchmark cudnn.benchmark_limit cudnn.depthwise_kernel cudnn.deterministic cudnn.enabled
cudnn.fp32_precision mha.set_fastpath_enabled miopen.immediate mkldnn.allow_tf32 mkldnn.deterministic mkldnn.enabled
mkldnn.fp32_precision nnpack.set_flags opt_einsum.enabled opt_einsum.strategy quantized.engine
"""
NO_NUMBERS = """
_set_autograd_fallback_mode _set_backcompat_broadcast_warn _set_backcompat_keepdim_warn
_set_check_sparse_tensor_invariants _set_print_stack_traces_on_fatal_signal _set_should_use_format_with_string_table
_set_thread_name _set_throw_on_mutable_data_ptr _set_warnAlways _set_warn_deprecated_on_mutable_data_ptr
_set_warn_on_accumulate_grad_stream_mismatch _set_worker_pids _set_worker_signal_handlers set_printoptions
set_warn_always _set_sm_carveout_experimental _set_multithreading_enabled _set_override_stale_capture_stream
set_num_interop_threads _set_cached_tensors_enabled _set_generator_metaclass _set_grad_layout_enforcement_enabled
_set_view_replay_enabled _set_storage_access_error_msg _set_storage_data_ptr_access_error_msg set_vital
"""
"""They change what is said, or how fast it is, and no result."""
OF_A_TENSOR_OR_A_CALL = """
_set_conj _set_neg _set_tensor_metadata _set_dispatch_mode _set_torch_function_state _set_skip_next_torch_function
_set_tracing_state _set_value_trace _set_meta_in_tls_dispatch_include _set_only_lift_cpu_tensors
_set_dtensor_allow_implicit_replication _set_fwd_grad_enabled _set_graph_exec_group _set_graph_executor_optimize
"""
"""torch's own, for one tensor or while something is called; TorchScript's."""
ELSEWHERE = """
_set_default_mobile_cpu_allocator _set_default_tensor_type set_default_tensor_type set_autocast_ipu_dtype
set_autocast_ipu_enabled set_autocast_xla_dtype set_autocast_xla_enabled set_autocast_cpu_dtype
set_autocast_cpu_enabled set_autocast_gpu_dtype
python_native.all_dsls python_native.available_dsls python_native.enable_dispatch_keys python_native.enable_operations
"""
"""Other names of the same, devices that the runner does not know, and kernels in languages that are not installed."""


def settable():
    """What a version of torch offers for setting something, by name."""
    yield from (name for name in dir(torch._C) if name.startswith("_set_"))
    yield from (name for name in dir(torch) if name.startswith(("set_", "use_")))
    for info in pkgutil.iter_modules(torch.backends.__path__):
        module = import_module(f"torch.backends.{info.name}")
        if type(module) is not types.ModuleType:  # whose attributes are settings
            properties = (type(each).__name__ for each in vars(type(module)).values())
            named = zip(vars(type(module)), properties, strict=True)
            yield from (f"{info.name}.{name}" for name, kind in named if kind in ("ContextProp", "property"))
        for name in dir(module):
            setter = name.startswith(("set_", "enable_", "allow_", "preferred_"))
            if setter and getattr(getattr(module, name), "__module__", "").startswith(module.__name__):
                yield f"{info.name}.{name}"


def test_every_setting_of_this_torch_is_known():
    known = {*KEPT.split(), *NO_NUMBERS.split(), *OF_A_TENSOR_OR_A_CALL.split(), *ELSEWHERE.split()}
    unknown = set(settable()) - known
    assert not unknown, "keep them in runner/system/torch_settings.py, or say here why not"
