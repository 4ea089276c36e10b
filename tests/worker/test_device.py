"""What `auto` means, and what is refused."""

import pytest
import torch

from worker.device import Precision, available_cores, choose_device, choose_precision, cpu_name

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "expected"), [("AVX2", "int4"), ("AVX512", "int4"), ("DEFAULT", "float32")]
)
def test_auto_on_a_cpu_goes_by_its_kernels(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose_precision("auto", CPU).name == expected


def test_each_name_has_its_dtype_and_packing():
    assert choose_precision("auto", GPU) == Precision("bfloat16", torch.bfloat16, None)
    assert choose_precision("float64", CPU) == Precision("float64", torch.float64, None)
    for packing in ("int4", "int8"):
        assert choose_precision(packing, CPU) == Precision(packing, torch.bfloat16, packing)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_packed_weights_are_refused_on_a_gpu(name):
    with pytest.raises(ValueError, match=f"model.dtype {name} runs on the CPU only"):
        choose_precision(name, GPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    assert choose_device("auto") == CPU
    with pytest.raises(ValueError, match="model.device is cuda"):
        choose_device("cuda")


def test_a_quota_cuts_the_cores(tmp_path):
    quota = tmp_path / "cpu.max"
    whole = available_cores(tmp_path / "missing")
    for content, expected in [("max 100000", whole), ("100000 100000", 1), ("50000 100000", 1)]:
        quota.write_text(content)
        assert available_cores(quota) == expected


def test_cpu_name_tells_the_model_and_what_torch_uses_of_it(tmp_path):
    capability = torch.backends.cpu.get_cpu_capability()
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nflags\t: avx2\n")
    assert cpu_name(info) == f"Some CPU @ 2.00GHz {capability}"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu_name(info) == cpu_name(tmp_path / "missing") == capability
