"""Kernels in CUDA C++: compiled by the library that torch brings (NVRTC), launched through the driver. For what Triton's
languages do not have. Knows no kernel.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import RunnerFailed

_MAX_DYNAMIC_SHARED = 8
_STARTS_EARLY = 6
_BF16, _PROMOTE_128 = 9, 2
# By the bytes of a line in shared memory.
_SWIZZLES = {64: 2, 128: 3}
_MAJORS = ("13", "12")
_TYPES = "typedef unsigned short u16;\ntypedef unsigned int u32;\ntypedef unsigned long long u64;\n"


class Map(ctypes.Structure):
    """How the copy engine finds its way in a tensor."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def can_run(architecture: str) -> bool:
    """Whether a kernel can be compiled and loaded here, on a card of this architecture."""
    if _compiler() is None:
        return False
    # The driver needs a context, which memory brings.
    torch.empty(1, device="cuda")
    try:
        Kernel(compile_source('extern "C" __global__ void nothing() {}', architecture), "nothing", 0)
    except (RunnerFailed, RuntimeError):
        return False
    return True


def compiler_version() -> str:
    """Major and minor; empty where there is no compiler."""
    compiler, numbers = _compiler(), (ctypes.c_int(), ctypes.c_int())
    if compiler is None:
        return ""
    _check_compiler(compiler.nvrtcVersion(*map(ctypes.byref, numbers)))
    return ".".join(str(number.value) for number in numbers)


def tile_map(matrix: Tensor, lines: int, columns: int, count: int | None = None) -> Map:
    """Of tiles of a matrix in bf16, swizzled in shared memory, whose lines have 64 or 128 bytes there. Of its lines only
    the first `count` are written, or more are read than it seems to have."""
    height, width = matrix.shape
    return _map(matrix, (width, height if count is None else count), (matrix.stride(0),), (columns, lines))


def pair_map(matrix: Tensor, eights: int, columns: int) -> Map:
    """Of tiles of two halves of a matrix's lines by turns, eight of each, so many times `eights`. Its places are a column,
    0, 0, and the eights before it."""
    height, width = len(matrix) // 2, matrix.shape[1]
    assert matrix.is_contiguous() and len(matrix) % 16 == 0
    return _map(matrix, (width, 8, 2, height // 8), (width, height * width, 8 * width), (columns, 8, 2, eights))


def _map(matrix: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Map:
    """All in elements, columns first; they lie side by side."""
    assert matrix.dtype == torch.bfloat16 and matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0
    room = ctypes.create_string_buffer(ctypes.sizeof(Map) + 64)
    # The driver wants it at 64 bytes.
    at, count = -(-ctypes.addressof(room) // 64) * 64, len(sizes)
    longs, words = ctypes.c_uint64 * count, ctypes.c_uint32 * count
    apart = (ctypes.c_uint64 * (count - 1))(*(stride * matrix.itemsize for stride in strides))
    where = (ctypes.c_void_p(at), _BF16, count, ctypes.c_void_p(matrix.data_ptr()))
    told = (longs(*sizes), apart, words(*box), words(*(1,) * count))
    swizzle = _SWIZZLES[box[0] * matrix.itemsize]
    _check(_driver().cuTensorMapEncodeTiled(*where, *told, 0, swizzle, _PROMOTE_128, 0))
    return Map.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Map)))


class Kernel:
    """One function of what `compile_source` made, on the current device."""

    def __init__(self, image: bytes, name: str, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), image))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        if shared_bytes:
            _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes))

    def launch(self, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """On the current stream, early (see `kernels.early`). Arguments are values of ctypes; they are copied."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        early = _Attribute(_STARTS_EARLY, 0, (ctypes.c_uint64 * 8)(1))
        stream = torch.cuda.current_stream().cuda_stream
        asked = _Launch((blocks, 1, 1), (threads, 1, 1), self._shared_bytes, stream, ctypes.pointer(early), 1)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(asked), self._function, places, None))


def compile_source(source: str, architecture: str) -> bytes:
    """For a card of this architecture, `sm_90a` for example."""
    compiler = _compiler()
    if compiler is None:
        raise RunnerFailed("a kernel cannot be compiled: there is no libnvrtc beside torch, and the system has none")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (_TYPES + source).encode()
    asked = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")

    def read(ask_size: Callable[..., int], ask: Callable[..., int]) -> bytes:
        _check_compiler(ask_size(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        _check_compiler(ask(program, found))
        return found.raw

    _check_compiler(compiler.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
    try:
        if compiler.nvrtcCompileProgram(program, len(asked), asked):
            said = read(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog)
            raise RunnerFailed(f"a kernel cannot be compiled: {said.decode(errors='replace').strip()}")
        return read(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL | None:
    """That of torch's own version, which lies in a package beside it, or the system's. A torch without CUDA takes any."""
    beside = Path(torch.__file__).parent.parent / "nvidia"
    for major in _MAJORS if torch.version.cuda is None else (torch.version.cuda.partition(".")[0],):
        name = f"libnvrtc.so.{major}"
        for folder in (beside / f"cu{major}" / "lib", beside / "cuda_nvrtc" / "lib"):
            if (folder / name).exists():
                # It looks for these by their names alone.
                for part in folder.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(part))
                return ctypes.CDLL(str(folder / name))
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _check_compiler(result: int) -> None:
    if result:
        raise RunnerFailed(f"a kernel cannot be compiled: NVRTC says {result}")


def _check(result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"the driver: {(words.value or b'unknown error').decode()}")
