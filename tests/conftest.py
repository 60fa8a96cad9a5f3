"""What every test starts from: a known seed, one thread, and only the tests that this machine can run."""

import gc
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from .cpu_seconds import CpuSeconds
from .pairwise import mark_the_rest

if not torch.cuda.is_available():  # Triton decides when it is imported whether it interprets its kernels
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = "tests.desk"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds of each test to a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(config), "cpu-seconds")
    # Tensors are tiny here. With more threads, every one of them waits for cores that other workers and programs hold:
    # PyTorch's fp64 grouped convolution, a parallel region per channel, then takes seconds instead of microseconds.
    torch.set_num_threads(1)
    # started behind a shell's &, this process ignores Ctrl-C, and so would those that tests start and interrupt
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)
    devices = torch.accelerator.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if devices < needed and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} accelerator(s), found {devices}"))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and collected tests, half a million objects that full collections would visit


@pytest.fixture(scope="session", autouse=True)
def at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home for the key that signs what runs write; the one of whoever runs the tests is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # what an earlier test ran in this process may have changed it


@pytest.fixture(autouse=True)
def release_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Release the memory that PyTorch caches on a GPU after each test, for the other workers that share it."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Lightning ignores Ctrl-C for the rest of the process once a run has been interrupted."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def highest() -> Iterator[None]:
    """PyTorch's default precision, which deterministic mode needs on a processor, and which runs may change."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], ModuleType]:
    """Imports a module of an independent implementation. Without it a test is skipped at home, and fails in CI."""

    def load(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{name} cannot be imported ({error}); install the extra 'test'")

    return load
