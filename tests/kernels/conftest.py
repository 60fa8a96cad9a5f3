"""Without a GPU, Triton kernels run under the interpreter (`tests/conftest.py`), which is made to check addresses."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip work of the interpreter that changes no result: most of its time.

    It patches Triton's language again in each call of a device function, instead of once per launch, and checks each
    sum and product of integers for an overflow, while tensors are far too small for one. It writes the name of the type
    and wraps each number of the shape of every intermediate tensor, which are now computed once per type and shape.
    Constants, and the common shape of two tensors, are also computed once; tensors of one type are not converted to it.
    """
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, start, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[bool]()

    def patch_once(function: Any) -> Any:
        key = any(x is tl for x in function.__globals__.values())  # otherwise it is patched in `tl.core` alone
        if key in done:
            return None  # only launches use the result
        done.add(key)
        return patch(function)

    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        done.clear()
        start(self, *arguments, **named)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    for owner, name, function in _REMEMBERED:
        monkeypatch.setattr(owner, name, function)


def _remembered() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Functions of the interpreter that remember what depends on the type and shape of a tensor only."""
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    make_block, make_tensor, numpy_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    broadcast, convert = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    make_constant = semantic.scalar_constant
    blocks: dict[Any, dict[str, Any]] = {}
    common: dict[tuple[int, int], Any] = {}
    constants: dict[Any, Any] = {}
    sizes: dict[Any, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = getattr(shape, "values", shape)
        key = (element_ty.name, *[size.value if isinstance(size, tl.constexpr) else size for size in numbers])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {"numel": self.numel, "name": self.name, "shape": sizes.setdefault(key[1:], self.shape)}
        self.element_ty = element_ty
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def dtype_of(tt_dtype: Any) -> Any:
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = numpy_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    def widened(x: Any, shape: Any) -> Any:
        if x.type.is_block() and x.type.shape is shape:
            return x
        data = np.empty(tuple(shape.values), x.handle.data.dtype)
        data[...] = x.handle.data
        return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), tl.block_type(x.dtype, shape))

    def broadcast_to_common(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = (x.type.shape if x.type.is_block() else None for x in (lhs, rhs))
        if left is right:
            return lhs, rhs
        key = id(left), id(right)  # of shapes that `sizes` holds
        if key not in common:
            lhs, rhs = broadcast(self, lhs, rhs)
            common[key] = lhs.type.shape
            return lhs, rhs
        return widened(lhs, common[key]), widened(rhs, common[key])

    def convert_unless_equal(self: Any, lhs: Any, rhs: Any, *rules: Any) -> Any:
        equal = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype.name == rhs.dtype.name
        if equal and lhs.dtype.name in ("fp32", "int32", "int64", "int1"):  # which no operation converts
            return self.broadcast_impl_value(lhs, rhs)
        return convert(self, lhs, rhs, *rules)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    yield semantic, "broadcast_impl_value", broadcast_to_common
    yield semantic, "binary_op_type_checking_impl", convert_unless_equal
    yield semantic, "scalar_constant", constant
    yield tl.block_type, "__init__", block
    yield tl.tensor, "__init__", tensor
    yield interpreter, "_get_np_dtype", dtype_of


_REMEMBERED = [*_remembered()] if INTERPRETED else []


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill new tensors with NaN or large integers, so that reading unwritten memory shows, and forget earlier plans."""
    pytest.importorskip("triton")
    from kernels.gpu import plan

    plan.of_rows.cache_clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def masks_of_bools() -> Iterator[None]:
    """Masks are bools: the interpreter also makes masks of integers, which that of Triton 3.9 refuses to read."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def truth(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder, "create_masked_load", lambda self, at, mask, *rest: load(self, at, truth(mask), *rest)
        )
        patch.setattr(
            InterpreterBuilder,
            "create_masked_store",
            lambda self, at, value, mask, *rest: store(self, at, value, truth(mask), *rest),
        )
        yield


@pytest.fixture(autouse=True)
def rows_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product does not depend on its position in the tile, as on a GPU.

    On processors without AVX-512, NumPy's BLAS adds up the rows of a tile in different orders. Sums in fp64 make these
    orders too small a difference to change a rounded result.
    """
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def rounded_once(self: Any, a: Any, b: Any, added: Any, *options: Any) -> Any:
        if added.data.dtype != np.float32:
            return multiply(self, a, b, added, *options)
        product = multiply(self, a, b, TensorHandle(np.zeros(added.data.shape), tl.float64), *options)
        return TensorHandle(product.data.astype(np.float32) + added.data, added.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", rounded_once)


@pytest.fixture(autouse=True)
def inside_arguments(masks_of_bools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel reads or writes outside its arguments. The interpreter by itself would not notice."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    memory: dict[str, tuple[int, int]] = {}  # of the tensors of the launch that is under way: first byte, one past last

    def launched(self: Any, arguments: tuple[Any, ...], named: dict[str, Any], *, start: Callable[..., Any]) -> Any:
        memory.clear()
        for name, x in (*zip(self.arg_names, arguments, strict=False), *named.items()):
            if isinstance(x, torch.Tensor) and x.numel():
                reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
                memory[name] = x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
        return start(self, arguments, named)

    def check(at: Any, mask: Any) -> None:
        touched = at.data[mask.data.astype(bool)]
        if not touched.size:
            return
        first, end = int(touched.min()), int(touched.max()) + max(at.get_element_ty().primitive_bitwidth // 8, 1)
        if not any(low <= first and end <= high for low, high in memory.values()):
            far = {name: (first - low, end - high) for name, (low, high) in memory.items()}
            raise AssertionError(f"outside its arguments: bytes from each one's first and from its end are {far}")

    def load(self: Any, at: Any, mask: Any, *rest: Any, do: Callable[..., Any]) -> Any:
        check(at, mask)
        return do(self, at, mask, *rest)

    def store(self: Any, at: Any, value: Any, mask: Any, *rest: Any, do: Callable[..., Any]) -> Any:
        check(at, mask)
        return do(self, at, value, mask, *rest)

    def bound(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda self, *arguments: function(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "_init_args_hst", bound(launched, start=GridExecutor._init_args_hst))
    for name, function in (("create_masked_load", load), ("create_masked_store", store)):
        monkeypatch.setattr(InterpreterBuilder, name, bound(function, do=getattr(InterpreterBuilder, name)))
