# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped"
"""Kernels compiled before they are launched, many at once: a card that never ran a model compiles for half a minute if it
takes one after the other. Knows no kernel; whoever asks shows which are launched.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from headrace.runner.cuda.compilers import Compilers, Order
from headrace.runner.cuda.kernels.clusters import compile_clusters
from headrace.runner.cuda.products import Noted, products_noted

# A kernel, and how it is to be compiled in Triton's words.
_Asked = tuple[Any, str]
# That compile CUDA C++, which holds no lock.
_MOST_NATIVE = 4


@contextmanager
def compiling(work: Callable[[], object], device: torch.device, compilers: Compilers) -> Iterator[None]:
    """`work` is called, but what it launches and has not been compiled is only noted, so it must not mind what is in its
    memory. That is compiled, and each kind of product made once, beside what the caller does inside, who launches nothing
    of it; at the end all of it can be launched. The caller may be reading weights in threads, which wait for Python's
    lock: there are few threads here, and they hold it little."""
    with ThreadPoolExecutor(2, "compile", torch.cuda.set_device, (device,)) as pool, closing(compilers):
        with products_noted() as products:
            asked = _asked_by(work)
        compilers.ask(_order(asked))
        making = pool.submit(_make, tuple(products), torch.cuda.current_stream(device))
        # They hold memory.
        products.clear()
        loading = pool.submit(_load_compiled, asked, compilers)
        yield
        making.result()
        for kernel, told in loading.result():
            _load(kernel, told)


def _make(products: tuple[Noted, ...], stream: torch.cuda.Stream) -> None:
    """The libraries look for their kernels while ours are compiled."""
    sources = {product.source for product in products if product.source}
    with ThreadPoolExecutor(_MOST_NATIVE, "native") as pool, torch.inference_mode(), torch.cuda.stream(stream):
        compiled = pool.map(compile_clusters, sources)
        for product in products:
            if not product.source:
                product.make()
        for _ in compiled:
            pass
        for product in products:
            if product.source:
                product.make()


def _load_compiled(asked: list[_Asked], compilers: Compilers) -> list[_Asked]:
    """What nobody has compiled."""
    left = dict(enumerate(asked))
    for place in compilers.compiled():
        _load(*left.pop(place))
    return list(left.values())


def _order(asked: list[_Asked]) -> Order:
    target = driver.active.get_current_target()
    kernels = [(kernel.fn.__module__, kernel.fn.__qualname__, told) for kernel, told in asked]
    return Order((target.backend, target.arch, target.warp_size), kernels)


def _asked_by(work: Callable[[], object]) -> list[_Asked]:
    """Every kernel that it would have to wait for, in the order of asking."""
    asked: dict[tuple[Any, str], str] = {}

    def ask(*, fn, compile, **_) -> bool:
        asked[fn.jit_function, compile["key"]] = compile["specialization_data"]
        # Neither compiled nor launched.
        return True

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = ask
        work()
    return [(kernel, told) for (kernel, _), told in asked.items()]


def _load(kernel: Any, told: str) -> None:
    """From Triton's cache, where it is; else it is compiled. What launches it is asked for, so the card has it then."""
    _ = kernel.preload(told).run
