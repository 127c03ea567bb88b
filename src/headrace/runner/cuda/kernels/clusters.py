"""What kernels of clusters of two multiprocessors have in common: which cards run them, what a block has, and their source, of
which `clusters.cu` is the common part. Knows no kernel.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import torch

from headrace.runner.cuda.kernels.early import capability
from headrace.runner.cuda.native import Kernel, can_run, compile_source

_ARCHITECTURE = "sm_90a"
THREADS = 384
# Of shared memory, that a block may have.
ROOM = 232_448


def can_cluster(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) == (9, 0) and can_run(_ARCHITECTURE)


@cache
def compile_clusters(source: str) -> bytes:
    """Seconds in which others may compute; threads that compile one source at the same time do so twice."""
    return compile_source(source, _ARCHITECTURE)


def cluster_kernel(source: str, name: str, shared_bytes: int) -> Kernel:
    """On the current device."""
    return Kernel(compile_clusters(source), name, shared_bytes)


def cluster_source(name: str, defined: Mapping[str, int], **multiply: int) -> str:
    """The file `name` with what it needs: numbers, and functions that multiply so many lines each."""
    head = "".join(f"#define {word} {value}\n" for word, value in defined.items())
    multiplied = "".join(_multiply(function, wide) for function, wide in multiply.items())
    return (
        head
        + multiplied
        + "".join(files(__package__).joinpath(part).read_text("utf-8") for part in ("clusters.cu", name))
    )


def _multiply(name: str, wide: int) -> str:
    """64 lines of one tile times `wide` of another, 16 columns of both; nothing is added to where `adds` is 0."""
    count = wide // 2
    places = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(x[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void {name}(float (&x)[{count}], u64 a, u64 b, int adds) {{\n"
        f'  asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{wide}k16.f32.bf16.bf16 {{{places}}}, %{count}, %{count + 1},'
        f' adds, 1, 1, 0, 0;\\n}}"\n'
        f'    : {sums} : "l"(a), "l"(b), "r"(adds));\n}}\n'
    )
