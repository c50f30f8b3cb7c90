"""Tensors of a torch.save pickle as places in a file: what the restricted unpickler builds instead of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ucformat import dtypes
from ucformat.dtypes import DTYPES
from ucformat.errors import brief
from ucformat.lazy_torch import torch
from ucformat.pickles.inert import Inert, InertType, inert_class
from ucformat.pickles.values import MAX_EXTENT, Builder, sealed, sizes_of


@sealed
@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class: the dtype name of its items, or None for untyped bytes and for `refused` kinds."""

    dtype: str | None
    refused: str = ""


@sealed
@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A torch storage as a place in a file: `nbytes` bytes at `start` of `file`. `key` is its record's number."""

    key: str
    kind: StorageType
    file: str
    start: int
    nbytes: int
    location: str


@sealed
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A torch tensor as a place in a file. `shape`, `stride` and `offset` count items of `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StoredStorage
    requires_grad: bool = False
    parameter: bool = False

    @property
    def file(self) -> str:
        return self.storage.file

    @property
    def start(self) -> int:
        """Byte offset of the first item in the file."""
        return self.storage.start + self.offset * DTYPES[self.dtype].itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the items lie in row-major order without gaps."""
        step = 1
        for n, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and stride != step and 0 not in self.shape:
                return False
            step *= n
        return True


@sealed
@dataclass(frozen=True, slots=True)
class RefusedTensor:
    """A tensor that is no dense array at one place: `kind` says what it is ("a sparse tensor")."""

    kind: str


def _dense(storage: object, offset: object, shape: object, stride: object, dtype: str | None) -> StoredTensor | RefusedTensor:
    """The tensor, checked to lie inside its storage."""
    if not isinstance(storage, StoredStorage):
        raise ValueError("a tensor's storage is no storage record")
    if storage.kind.refused:
        return RefusedTensor(storage.kind.refused)
    name = dtype or storage.kind.dtype
    if name is None:
        raise ValueError("a tensor on an untyped storage has no dtype")
    sizes, steps = sizes_of(shape, "shape"), sizes_of(stride, "stride")
    if len(sizes) != len(steps) or type(offset) is not int or not 0 <= offset < MAX_EXTENT:
        raise ValueError(f"tensor with shape {sizes}, stride {steps}, offset {brief(offset)}")
    items = 0 if 0 in sizes else 1 + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
    if items and (offset + items) * DTYPES[name].itemsize > storage.nbytes:
        raise ValueError(f"tensor {list(sizes)} at item {offset} reaches beyond its storage of {storage.nbytes} bytes")
    return StoredTensor(name, sizes, steps, offset, storage)


def _with_grad(tensor: StoredTensor | RefusedTensor, requires_grad: object, metadata: object) -> StoredTensor | RefusedTensor:
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        return RefusedTensor("a lazily conjugated or negated view (call resolve_conj() / resolve_neg() before saving)")
    if isinstance(tensor, RefusedTensor) or not requires_grad:
        return tensor
    return StoredTensor(tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.storage, True)


def _tensor_v1(storage: object, offset: object, shape: object, stride: object) -> object:
    return _dense(storage, offset, shape, stride, None)


def _tensor_v2(
    storage: object, offset: object, shape: object, stride: object, grad: object, hooks: object, metadata: object = None
) -> object:
    return _with_grad(_dense(storage, offset, shape, stride, None), grad, metadata)


def _tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    name = _dtype_name(dtype)
    if name is None:
        return RefusedTensor(f"a tensor of dtype {brief(dtype)}")
    return _with_grad(_dense(storage, offset, shape, stride, name), grad, metadata)


def _dtype_name(dtype: object) -> str | None:
    """The name of a dtype, None for one that has no place in any checkpoint of ours."""
    try:
        return dtypes.from_torch(dtype).name if isinstance(dtype, torch.dtype) else None
    except KeyError:
        return None


def _parameter(data: object, requires_grad: object, hooks: object, state: object = None) -> object:
    if not isinstance(data, StoredTensor):
        return data
    return StoredTensor(data.dtype, data.shape, data.stride, data.offset, data.storage, bool(requires_grad), True)


def _from_type(rebuild: object, kind: object, args: object, state: object = None) -> object:
    """A tensor subclass: the plain tensor in it when it is rebuilt by one of ours, else a stand-in with its inner tensors."""
    if not isinstance(args, tuple):
        raise ValueError("arguments of a tensor subclass are no tuple")
    if not isinstance(rebuild, (Builder, InertType)):
        raise ValueError("a tensor subclass is rebuilt by something that is no function")
    built: object = rebuild(*args)
    if isinstance(built, Inert):
        built.state = state
    return built


def _moved(data: object, *_: object) -> object:
    return data


def _refuse(kind: str) -> Callable[..., object]:
    def build(*_: object) -> object:
        return RefusedTensor(kind)

    return build


def _wrapper_subclass(kind: object, dtype: object = None, size: object = None, *_: object) -> object:
    """A tensor that is made of others (DTensor, ShardedTensor, quantised ones of torchao): those are in its state."""
    return inert_class(kind.class_name if isinstance(kind, InertType) else "torch.Tensor")(dtype, size)


_SPARSE = "a sparse tensor (call to_dense() before saving)"
_RUNS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _moved,
    "torch._utils._rebuild_sparse_tensor": _refuse(_SPARSE),
    "torch._utils._rebuild_sparse_csr_tensor": _refuse(_SPARSE),
    "torch._utils._rebuild_qtensor": _refuse("a quantised tensor (call dequantize() or int_repr() before saving)"),
    "torch._utils._rebuild_nested_tensor": _refuse("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _refuse("a meta tensor, which has no data"),
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
}

_STORAGES = {
    "Float": "F32", "Double": "F64", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16", "Char": "I8",
    "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "ComplexDouble": "C128", "ComplexHalf": "C32",
}  # fmt: skip
_QUANTISED = ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")


def storage_type(kind: object) -> StorageType | None:
    """The storage class that a pickle names, also of a device that this torch was not built for; None when it is none."""
    if isinstance(kind, StorageType):
        return kind
    name = kind.class_name if isinstance(kind, InertType) else ""
    item = name.rpartition(".")[2].removesuffix("Storage")
    if not name.startswith("torch.") or not name.endswith("Storage"):
        return None
    return StorageType(_STORAGES.get(item), "" if item in _STORAGES else f"a tensor on a {name}")


TENSORS: dict[str, object] = {
    **{name: Builder(name, run) for name, run in _RUNS.items()},
    **{f"torch.{name}Storage": StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.cuda.{name}Storage": StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.{name}Storage": StorageType(None, "a quantised tensor") for name in _QUANTISED},
    **{f"torch{module}.UntypedStorage": StorageType(None) for module in ("", ".storage")},
}
"""What whitelisted names ("module.name") stand for."""
