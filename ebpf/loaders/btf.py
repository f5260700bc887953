"""Names of the running kernel's own enumerations, from its type information, which anybody may read."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from pasta_otel.ebpf.loaders.core import load_libbpf

KIND_ENUM = 6
_MEMBERS_MASK = 0xFFFF  # of btf_type.info, include/uapi/linux/btf.h
DROP_PREFIX = "SKB_DROP_REASON_"


class _Type(ctypes.Structure):
    """``struct btf_type``."""

    _fields_ = (("name", ctypes.c_uint32), ("info", ctypes.c_uint32), ("size", ctypes.c_uint32))


class _Member(ctypes.Structure):
    """``struct btf_enum``."""

    _fields_ = (("name", ctypes.c_uint32), ("value", ctypes.c_int32))


def drop_reasons(library: Any = None) -> Mapping[int, str]:
    """Return why this kernel drops packets, by the number that its tracepoint gives: numbers differ between kernels.

    Empty where the kernel has no type information, or libbpf is not installed.
    """
    try:
        library = library or load_libbpf()
    except OSError:
        return {}
    names = _enumeration(library, b"skb_drop_reason")
    return {number: name.removeprefix(DROP_PREFIX) for number, name in names.items()}


def _enumeration(library: Any, name: bytes) -> dict[int, str]:
    library.btf__load_vmlinux_btf.restype = library.btf__type_by_id.restype = ctypes.c_void_p
    library.btf__name_by_offset.restype = ctypes.c_char_p
    types = ctypes.c_void_p(library.btf__load_vmlinux_btf())
    if not types:
        return {}
    try:
        number = library.btf__find_by_name_kind(types, name, KIND_ENUM)
        return _members(library, types, number) if number > 0 else {}
    finally:
        library.btf__free(types)


def _members(library: Any, types: ctypes.c_void_p, number: int) -> dict[int, str]:
    address = library.btf__type_by_id(types, number)
    count = _Type.from_address(address).info & _MEMBERS_MASK
    members = (_Member * count).from_address(address + ctypes.sizeof(_Type))
    return {member.value: library.btf__name_by_offset(types, member.name).decode() for member in members}
