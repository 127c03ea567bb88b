"""The numerics fingerprint of a model on a card: what a logit's last bit depends on, as one short string."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import msgspec
import torch

# Where the order of a sum is decided: kernels, how they are chosen, what is computed between them, by how many rows.
_SOURCES = (
    "triton_ops.py",
    "parted_ops.py",
    "exact_ops.py",
    "native.py",
    "products.py",
    "decoder.py",
    "fp8_decoder.py",
    "fp8_weights.py",
    "expert_space.py",
    "buckets.py",
    "layout.py",
    "packet.py",
)


def fingerprint(
    digest: Mapping[str, str], dtype: torch.dtype, ops: str, device: torch.device, *, fp8: bool = False
) -> str:
    """`dtype` is that of activations; `fp8`: matrices have eight bits."""
    parts = (
        sorted(digest.items()),
        (str(dtype), ops, kernels_version()),
        (device.type, device_kind(device), "fp8" if fp8 else ""),
        (str(torch.__version__), torch.version.cuda or "", compiler_version(), platform.machine()),
    )
    name = "fp8" if fp8 else str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return f"{device.type}-{name}-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}"


def kernels_version() -> str:
    """A hash of the sources, so that nobody has to remember to count."""
    package = files("headrace.runner.cuda")
    kernels = sorted(entry.name for entry in (package / "kernels").iterdir() if entry.name.endswith((".py", ".cu")))
    found = hashlib.sha256()
    for place in (*(package / name for name in _SOURCES), *(package / "kernels" / name for name in kernels)):
        data = place.read_bytes()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]


def compiler_version() -> str:
    """Triton's, which turns the sources into machine code. It is not imported: some who ask run no kernel."""
    for name in ("triton", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def device_kind(device: torch.device) -> str:
    """Cards of one name and capability run the same machine code."""
    if device.type != "cuda":
        return platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}"
