"""Padded tables that are filled again: every op computes what it computes with boundaries of its own, to the bit."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core import static_documents as static
from kernels.core.documents import copied, documents, rounded
from kernels.delta_rule.gpu import plan as delta_plan
from kernels.delta_rule.gpu.general import plan as general_plan
from kernels.gpu.device import GPUS, assumed
from kernels.gpu.layout import layout
from kernels.linear_recurrence.gpu import multi_pass
from kernels.linear_recurrence.gpu import plan as linear_plan
from kernels.window_attention import flex
from kernels.window_attention.arguments import Attention

from . import recurrences, test_selective_scan

pytestmark = pytest.mark.usefixtures("poison")

CPU = torch.device("cpu")
T = 200
# rows of T tokens: one document, as many as there is room for, empty ones, boundaries on and off the edges of chunks
ROWS = {
    "one": [0, T],
    "empty": [0, 0, 0, 64, 64, T, T, T],
    "single tokens": [0, 1, 2, 3, T],
    "on edges": [0, 64, 128, 192, T],
    "off edges": [0, 63, 65, 129, 130, 131, T],
    "full": [0, 10, 20, 30, 100, 120, 140, 190, T],
}
HALVES = ((0, 100), (100, T))
# three or four documents, one of them long, that one graph serves
FEW_ROWS = ([0, 0, 64, 65, T], [0, 136, 137, T])


@pytest.fixture
def cut_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut documents of more than one chunk (delta rule) or two (linear recurrence), as if a device were idle."""
    monkeypatch.setattr(delta_plan, "segments", lambda *_: 4)
    monkeypatch.setattr(delta_plan, "FEWEST_OF_LONGEST", 2)
    for module in (linear_plan, multi_pass):
        monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(linear_plan, "RESIDENT", 1000)


def prepared(bounds: list[int], device: torch.device = CPU) -> Tensor:
    """Static boundaries with room for these."""
    return static.static_copy(torch.tensor(bounds, dtype=torch.int32, device=device), bounds[-1])


def fill(boundaries: Tensor, bounds: list[int]) -> None:
    """Hold these boundaries, which must fit."""
    others = documents(torch.tensor(bounds, dtype=torch.int32, device=boundaries.device), bounds[-1])
    packed = static.static_documents(boundaries, bounds[-1])
    assert packed.fits(others)
    packed.fill(others)


def random_rows(length: int, count: int) -> Iterator[list[int]]:
    for seed in range(count):
        cuts = torch.randint(length + 1, (1 + 7 * seed % 50,), generator=torch.Generator().manual_seed(seed))
        yield [0, *(cuts[cuts % 3 > 0] // 64 * 64).tolist(), *cuts[cuts % 3 == 0].tolist(), length]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("length", "segment"), [(T, 128), (T, 1 << 20), (16384, 1024), (16384, 4096)])
def test_padded_tables_begin_with_those_of_the_documents(length: int, segment: int, steps: int):
    rows = [sorted(bounds) for bounds in random_rows(length, 12)]
    rows += ROWS.values() if length == T else [[0, length], list(range(0, length + 1, 64)), [0] * 100 + [length]]
    for bounds in rows:
        there, own = prepared(bounds), documents(torch.tensor(bounds), length)
        padded = static.static_documents(there, length)
        arguments = (1, length * steps, 64, 128, segment, CPU, steps)
        some, exact = layout(padded, *arguments), layout(own, *arguments)
        room, rows_of_pieces = rounded(len(own.spans)), lambda size, n=len(own.spans): length * steps // size + n
        assert (some.cut > 0) == (exact.cut > 0)
        assert exact.cut <= some.cut <= min(2 * length * steps // segment, len(some.segments))
        assert len(some.chunks) == length * steps // 64 + room
        assert len(exact.chunks) <= rows_of_pieces(64)
        for name in ("chunks", "blocks", "segments"):
            table, expected = getattr(some, name), getattr(exact, name)
            assert torch.equal(table[: len(expected), :4], expected[:, :4]), name
            assert not table[len(expected) :, 1].any(), name
        assert some.segments[:, -1].tolist() == list(range(len(some.segments)))
        assert torch.equal(some.sequences[: len(own.spans)], exact.sequences)
        if not some.cut:
            assert len(some.segments) == len(some.sequences) == room
        assert torch.equal(padded.owner, own.owner)
        assert torch.equal(padded.positions, own.positions)


def test_tables_are_filled_in_place():
    there = prepared(ROWS["off edges"])
    packed = static.static_documents(there, T)
    tables = layout(packed, 1, T, 64, 128, 128, CPU)
    owner, places = packed.owner, [x.data_ptr() for x in tables.tensors()]
    fill(there, [0, 5, 90, 90, 180, T])
    assert layout(packed, 1, T, 64, 128, 128, CPU) is tables
    assert [x.data_ptr() for x in tables.tensors()] == places
    assert there.tolist() == [0, 5, 90, 90, 180, T, T, T, T]
    assert torch.equal(packed.owner, owner)
    for name, table in vars(
        layout(static.static_documents(prepared(there.tolist()), T), 1, T, 64, 128, 128, CPU)
    ).items():
        assert str(getattr(tables, name)) == str(table), name


def test_documents_fit_that_give_the_same_answers():
    packed = static.static_documents(prepared([0, 50, 120, T]), T)  # room for four
    assert packed.reaches(70)
    assert not packed.reaches(128)

    def fitting(*bounds: int, length: int = T) -> bool:
        return packed.fits(documents(torch.tensor(bounds), length))

    assert fitting(0, 0, 80, 160, T)
    assert not fitting(0, 50, T)  # room for two
    assert not fitting(0, 40, 80, 120, 160, T)
    assert not fitting(0, 66, 132, T)
    assert not fitting(0, 72, T, T)
    assert not fitting(0, 50, 120, 201, length=201)
    assert fitting(0, 127, 127, T)
    assert packed.longest_bound() == packed.longest_bound() == 128
    assert not packed.reaches(129)


def test_parts_are_filled_with_the_row():
    there = prepared([0, 50, 120, T])
    packed, others = static.static_documents(there, T), documents(torch.tensor([0, 99, 101, T]), T)
    assert packed.fits(others)
    first, second = (packed.part(number, HALVES) for number in range(2))
    assert first.tolist() == [0, 50, 100]
    owner = documents(second, 100).owner
    packed.fill(others)
    for number, boundaries in enumerate((first, second)):
        assert packed.part(number, HALVES) is boundaries
        assert torch.equal(boundaries, others.part(number, HALVES))
    assert owner.tolist() == [0] + [1] * 99


def test_processes_with_equal_answers_agree_on_what_fits():
    both = [static.static_documents(prepared([0, 50, 120, T]), T) for _ in range(2)]
    for number, (packed, tokens) in enumerate(zip(both, (60, 90), strict=True)):
        # the launches of a part depend on the longest document of all parts
        assert documents(packed.part(number, HALVES), 100).reaches(tokens) == (tokens == 60)
    other = documents(torch.tensor([0, 92, 120, T]), T)
    assert [packed.fits(other) for packed in both] == [True, False]
    for packed in both:
        for answers in [each.answers() for each in both]:
            packed.require(answers)
    assert [packed.fits(other) for packed in both] == [False, False]
    assert all(packed.fits(documents(torch.tensor([0, 61, 115, T]), T)) for packed in both)


def test_parts_have_room_for_the_documents_of_the_fullest():
    there = static.static_copy(torch.tensor([0, 10, 20, 120, T]), T, parts=2)
    packed = static.static_documents(there, T)
    assert [len(packed.part(number, HALVES)) for number in range(2)] == [5, 5]  # three and two documents
    fitting = {
        (0, 50, 80, 95, T): True,
        (0, 120, 130, 140, T): True,
        (0, 30, 60, 90, 100, 150, 160, 170, T): True,  # twice as many in the row
        (0, 50, T): False,
        (0, 10, 20, 30, 40, T): False,
    }
    for bounds, expected in fitting.items():
        assert packed.fits(documents(torch.tensor(bounds), T)) == expected, bounds


def test_a_part_does_not_wait_for_documents_that_are_longer_than_it():
    """Parts of 101 and 99 tokens, each of one document."""
    parts, there = ((0, 101), (101, T)), prepared([0, 101, T])
    for row in (static.static_documents(there, T), documents(torch.tensor([0, 101, T]), T)):
        first, second = (documents(row.part(number, parts), n) for number, n in enumerate((101, 99)))
        assert (first.reaches(101), first.reaches(102)) == (True, False)
        assert (second.reaches(99), second.reaches(100)) == (True, False)
        assert second.longest_bound() == 99
    packed = static.static_documents(there, T)
    assert packed.fits(documents(torch.tensor([0, 101, T]), T))


def test_boundaries_and_tables_go_together():
    there = prepared([0, 3, 5])
    packed = weakref.ref(static.static_documents(there, 5))
    gc.disable()
    try:
        del there
        assert packed() is None
    finally:
        gc.enable()


def test_a_graph_does_not_take_boundaries_from_the_host(monkeypatch: pytest.MonkeyPatch):
    there = prepared([0, 50, 120, T])
    packed = static.static_documents(there, T)
    owner = packed.owner
    monkeypatch.setattr(static, "capturing", lambda device: True)
    assert packed.owner is owner
    for read in (lambda: packed.spans, lambda: packed.chunks(64), lambda: packed.bounds, lambda: packed.longest):
        with pytest.raises(RuntimeError, match="on the host"):
            read()


def test_boundaries_copied_from_the_host_are_not_read_from_a_device(monkeypatch: pytest.MonkeyPatch):
    original = torch.tensor([0, 2, 5])
    copy = copied(original.clone(), original)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))
    monkeypatch.setattr(Tensor, "tolist", lambda x: pytest.fail("read"))
    assert kernels.documents(copy, 5).bounds == [0, 2, 5]
    saved = copy.detach()  # as hooks of saved tensors return it
    assert kernels.documents(saved, 5) is kernels.documents(copy, 5)
    monkeypatch.undo()
    copy[1] = 3
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))
    assert kernels.documents(saved, 5).bounds == [0, 3, 5]


def recurrence(op: Any, **options: Any) -> Callable[..., dict[str, Tensor]]:
    a = recurrences.inputs(T, G=1, K=16, V=16, documents=[0, T], state=False, dtype=torch.float32, **options)
    return partial(recurrences.results, op, a, backend="triton", through=("o",), subheads=options.get("E", 1))


def scan(**options: Any) -> Callable[..., dict[str, Tensor]]:
    a = test_selective_scan.inputs(T, D=4, documents=[0, T], state=False, dtype=torch.float32, **options)
    return partial(recurrences.results, kernels.selective_scan, a, backend="triton", through=("o",))


def conv() -> Callable[..., dict[str, Tensor]]:
    x, weight = torch.randn(1, T, 2, 16), torch.randn(32, 1, 4)

    def features(**arguments: Any) -> tuple[Tensor, Tensor]:
        assert arguments.pop("return_state")
        y, _ = kernels.features(**arguments, norm="l2")
        return y, y.new_zeros(1, requires_grad=True)

    return partial(recurrences.results, features, {"x": x, "weight": weight}, backend="triton", through=("o",))


def erased(op: Any, **options: Any) -> Callable[..., dict[str, Tensor]]:
    run = recurrence(op, **options)
    run.args[1]["erase"] = torch.nn.functional.normalize(torch.randn_like(run.args[1]["k"]), dim=-1)
    return run


OPS: Mapping[str, Callable[[], Callable[..., dict[str, Tensor]]]] = {
    "delta_rule": lambda: recurrence(kernels.delta_rule, R=2, decay="mixed"),
    "delta_rule constant": lambda: recurrence(kernels.delta_rule, gate="constant"),
    "general_delta_rule": lambda: recurrence(kernels.delta_rule, gate="channel", decay="mixed"),
    "erase": lambda: erased(kernels.delta_rule),
    "linear_recurrence": lambda: recurrence(kernels.linear_recurrence, R=2),
    "linear_recurrence constant": lambda: recurrence(kernels.linear_recurrence, gate="constant", beta=None),
    "linear_recurrence channel": lambda: recurrence(kernels.linear_recurrence, gate="channel", decay="mixed"),
    "selective_scan": lambda: scan(),
    "selective_scan constant": lambda: scan(c="constant"),
    "features": conv,
}


NIGHTLY = [pytest.mark.nightly]
OFTEN = ("delta_rule", True), ("linear_recurrence", True)  # the interpreter takes seconds for each
CASES = [
    pytest.param(op, cut, where, marks=[pytest.mark.gpu] if where == "cuda" else [] if (op, cut) in OFTEN else NIGHTLY)
    for op in OPS
    for cut in ((False, True) if "_r" in op else (False,))
    for where in ("cuda", "cpu")
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "cut", "where"), CASES)
def test_padded_documents_change_no_bit(op: str, cut: bool, where: str, request: pytest.FixtureRequest):
    """Static boundaries, filled with one row after another, against the boundaries of each row.

    The interpreter, which is slow, does so for two rows.
    """
    if where == "cpu" and torch.cuda.is_available():
        pytest.skip("for the interpreter")
    if cut:
        request.getfixturevalue("cut_early")
    run, device, graphs, hits = OPS[op](), torch.device(where), list[Tensor](), 0
    a = {name: x.to(device) for name, x in run.args[1].items()}
    for bounds in (*FEW_ROWS, *(ROWS.values() if where == "cuda" else ())):
        own = torch.tensor(bounds, dtype=torch.int32, device=device)
        packed = documents(own, T)
        fitting = [there for there in graphs if static.static_documents(there, T).fits(packed)]
        if fitting:
            static.static_documents(fitting[0], T).fill(packed)
            hits += 1
        else:
            graphs.append(prepared(bounds, device))
        there = (fitting or graphs[-1:])[0]
        actual, expected = (run.func(run.args[0], {**a, "cu_seqlens": x}, **run.keywords) for x in (there, own))
        for name, x in expected.items():
            assert name == "state" or torch.equal(actual[name], x), (name, bounds)
    assert hits > 0


def plans(x: Tensor, length: int, heads: int) -> Iterator[Any]:
    """Everything that rounding depends on: how sequences are cut, and which kernels run, with which launches."""
    shape, bf16 = torch.Size([1, length, heads, 128]), torch.bfloat16
    stride = torch.empty(shape, device="meta").stride()
    delta = delta_plan.DeltaRule.of(x, length, shape, shape, 1, 1.0, bf16, CPU, len(x) - 1)
    yield delta.case, delta.prepare_path, delta.backward_path, delta.segment, bool(delta.cut)
    yield [delta.pass_entry(kernel) for kernel in ("forward", "backward")]
    sizes = (shape, shape, 1, 1.0, "channel", False, False, bf16, CPU, len(x) - 1)
    general = general_plan.GeneralDeltaRule.of(x, length, *sizes)
    yield [general.pass_entry(kernel) for kernel in ("forward", "backward")]
    for how in (("head", True), ("head", False), ("channel", False)):
        vectors = (shape, stride, stride, shape, stride, bf16, CPU)
        linear = linear_plan.LinearRecurrence.of(x, length, *vectors, *how, 1.0, 1, False, False)
        yield linear.path, linear.segmented, linear.copied
        yield linear.layout.segments[linear.layout.segments[:, 1] > 0].tolist()
    yield delta.layout.segments[delta.layout.segments[:, 1] > 0].tolist()


@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize(("length", "count"), [(2048, 1), (16384, 1), (65536, 1), (16384, 4), (65536, 4)])
def test_plans_of_padded_documents_are_those_of_the_documents(length: int, count: int, heads: int):
    """The documents of one row, and those of the parts of a row that several processes share."""
    graphs, parts = list[Tensor](), tuple((length * n // count, length * (n + 1) // count) for n in range(count))

    def rows(packed: Any, x: Tensor) -> list[Tensor]:
        return [x] if count == 1 else [packed.part(number, parts) for number in range(count)]

    with assumed(GPUS["H100"]):
        for bounds in (*map(sorted, random_rows(length, 25)), [0, length], [*range(0, length + 1, length // 8)]):
            own = torch.tensor(bounds, dtype=torch.int32)
            packed = documents(own, length)
            there = next((x for x in graphs if static.static_documents(x, length).fits(packed)), None)
            if there is None:
                graphs.append(there := static.static_copy(own, length, count))
            static.static_documents(there, length).fill(packed)
            pairs = zip(rows(static.static_documents(there, length), there), rows(packed, own), strict=True)
            for padded, exact in pairs:
                results = (plans(x, length // count, heads) for x in (padded, exact))
                for actual, expected in zip(*results, strict=True):
                    assert actual == expected
        assert len(graphs) < 20


@pytest.mark.parametrize("window", [None, 30])
def test_a_mask_of_blocks_is_filled_in_place(window: int | None):
    q = torch.randn(1, 512, 1, 16)

    def mask(boundaries: Tensor) -> Any:
        packed = documents(boundaries, 512)
        return flex.mask(Attention(q, q, q, window, None, 1.0, packed, boundaries))

    there = prepared([0, 100, 400, 512])
    before = mask(there)
    bounds = [0, 0, 256, 512]
    fill(there, bounds)
    assert mask(there) is before
    own = mask(torch.tensor(bounds))
    for x, y in zip(before.as_tuple(), own.as_tuple(), strict=True):
        assert not isinstance(x, Tensor) or torch.equal(x, y)
    query, key = torch.arange(512)[:, None], torch.arange(512)
    assert torch.equal(before.mask_mod(0, 0, query, key), own.mask_mod(0, 0, query, key))
