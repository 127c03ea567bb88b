"""Whether this machine has a card that the CUDA runner can use, and which device a model runs on then.

Owns the choice and its words, and a card that was woken for it until it is given back. Looks at torch and Triton.
"""

from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, byref, c_int, c_void_p
from importlib import import_module
from importlib.util import find_spec
from threading import Thread

from msgspec import Struct

from headrace.core.config import DEVICES
from headrace.core.errors import HeadraceError, InvalidInput, InvalidModel
from headrace.weights.shape import ModelShape

DTYPES = ("auto", "bf16", "fp8")
# Ampere: the first with bfloat16 products. Ada: the first with those of eight bits.
_LEAST_CAPABILITY = (8, 0)
_FP8_CAPABILITY = (8, 9)
_FP8_WIDTH = 16
_DRIVER = "libcuda.so.1"


class CardLook(Struct, frozen=True):
    """`words` name the card, or say why there is none to use; `no_fp8` says why it cannot multiply eight bits."""

    usable: bool
    words: str
    no_fp8: str = ""


def may_take_card(device: str, dtype: str, shape: ModelShape) -> bool:
    """Whether there are Triton, a driver, and a model that would run on its card; known before torch is imported, which takes
    seconds."""
    try:
        if find_spec("triton") is None or choose_device(device, dtype, shape, CardLook(True, "")) != "cuda":
            return False
        CDLL(_DRIVER)
    except (OSError, HeadraceError):
        return False
    return True


class WokenCard:
    """A driver that starts and a card that is taken in a thread, so that torch finds them there. Both take some tenths of a
    second without Python's lock, in which it may be imported. What fails here fails again where somebody asks."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._release: Callable[[], object] = lambda: None
        self._thread = Thread(target=self._wake, name="wake card", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give it back. Who computes on it has taken it, too, by then."""
        self._thread.join()
        self._release()

    def _wake(self) -> None:
        with suppress(OSError):
            driver, count, card, context = CDLL(_DRIVER), c_int(), c_int(), c_void_p()
            if driver.cuInit(0) or driver.cuDeviceGetCount(byref(count)) or not count.value:
                return
            driver.cuDeviceGet(byref(card), self._index % count.value)
            if not driver.cuDevicePrimaryCtxRetain(byref(context), card):
                self._release = lambda: driver.cuDevicePrimaryCtxRelease_v2(card)


def look_for_card() -> CardLook:
    import torch

    if torch.version.cuda is None:
        return CardLook(False, "this torch is built without CUDA")
    if not torch.cuda.is_available():
        return CardLook(False, "torch sees no CUDA card")
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    if capability < _LEAST_CAPABILITY:
        return CardLook(False, f"{name} has no bfloat16 (compute capability {capability[0]}.{capability[1]})")
    if find_spec("triton") is None:
        return CardLook(False, f"there is {name}, but Triton is not installed")
    try:
        version = import_module("triton").__version__
    except ImportError as error:
        return CardLook(False, f"there is {name}, but Triton cannot be imported: {error}")
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    no_fp8 = ""
    if capability < _FP8_CAPABILITY:
        no_fp8 = f"{name} has no products of eight bits (compute capability {capability[0]}.{capability[1]})"
    return CardLook(True, f"{name}, {memory:.0f} GiB, CUDA {torch.version.cuda}, Triton {version}", no_fp8)


def choose_device(device: str, dtype: str, shape: ModelShape, look: CardLook) -> str:
    """ "cuda" or "cpu". InvalidInput where what was asked for is not here, InvalidModel where a card cannot run it."""
    if device not in DEVICES:
        raise InvalidInput(f"device must be one of {', '.join(DEVICES)}", param="device")
    if device == "cpu":
        return "cpu"
    refused = _refusal(shape)
    if device == "auto":
        if look.usable and refused is None and dtype in DTYPES:
            return _checked(dtype, shape, look)
        if dtype in ("bf16", "fp8"):
            raise InvalidInput(f"dtype {dtype} needs a CUDA card: {refused or look.words}", param="dtype")
        return "cpu"
    if not look.usable:
        raise InvalidInput(f'device is "cuda": {look.words}', param="device")
    if dtype not in DTYPES:
        known = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        raise InvalidInput(f"on a CUDA card dtype must be {known}, not {dtype}", param="dtype")
    if refused is not None:
        raise InvalidModel(f"the CUDA runner cannot run this model: {refused}", param="device")
    return _checked(dtype, shape, look)


def _checked(dtype: str, shape: ModelShape, look: CardLook) -> str:
    if dtype == "fp8" and look.no_fp8:
        raise InvalidInput(f"dtype is fp8: {look.no_fp8}", param="dtype")
    refused = fp8_refusal(shape) if dtype == "fp8" else None
    if refused is not None:
        raise InvalidModel(f"fp8 cannot run this model: {refused}", param="dtype")
    return "cuda"


def _refusal(shape: ModelShape) -> str | None:
    """Kernels are written for heads whose size is a power of two."""
    dim = shape.head_dim
    if dim < 16 or dim > 256 or dim & (dim - 1):
        return f"its heads have {dim} dimensions, and kernels need a power of two from 16 to 256"
    return None


def fp8_refusal(shape: ModelShape) -> str | None:
    """Why a model cannot run with its matrices in eight bits."""
    if shape.experts is not None:
        return "products of its experts are in bf16 alone"
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    widths = (shape.hidden_size, heads * dim, (heads + 2 * kv_heads) * dim, shape.intermediate_size)
    odd = next((width for width in widths if width % _FP8_WIDTH), None)
    return None if odd is None else f"its products need widths in multiples of {_FP8_WIDTH}, and one is {odd}"
