import pytest
import torch

from kernels.gpu import device as device_module
from kernels.gpu import launch_table


@pytest.mark.parametrize(("gpu", "known"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_an_unlisted_gpu_gets_cautious_launches_and_a_line_in_the_log(
    gpu: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    device_module._capability.cache_clear()
    launch_table._entry.cache_clear()
    device, architecture = torch.device("cuda", 7), device_module.HOPPER if known else device_module.OTHER
    for _ in range(2):
        for kernel in ("linear_recurrence.carry", "delta_rule.prepare"):
            entry, table = launch_table.launch(kernel, 32, torch.bfloat16, device), launch_table.TABLE[kernel]
            serving = {key[1]: known for key, known in table.items() if key[::2] == (architecture, 2)}
            assert entry == serving[min(serving)]
    assert caplog.text.count(f"compute capability {gpu[0]}.{gpu[1]}") == (0 if known else 1)
    device_module._capability.cache_clear()
    launch_table._entry.cache_clear()


@pytest.mark.parametrize("tested", [True, False])
def test_a_hopper_gpu_with_an_untested_triton_warns_once(
    tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(device_module, "DIRECT", tested)
    monkeypatch.setattr(device_module, "_capability", lambda device: device_module.HOPPER)
    device_module._say.cache_clear()
    assert [device_module.runs_gluon(torch.device("cuda")) for _ in range(2)] == [tested] * 2
    assert caplog.text.count("kernels in Gluon are left out") == (not tested)
    device_module._say.cache_clear()
