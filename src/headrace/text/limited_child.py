"""The child's side of a limited process: `python -m headrace.text.limited_child`.

Owns its own confinement and the loop over jobs. Knows each kind of job only by name; holds no secret, since
its environment and its arguments hold none.
"""

import contextlib
import ctypes
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from setproctitle import setproctitle

from headrace.core.errors import HeadraceError
from headrace.core.parent import die_with_parent
from headrace.text.limited_wire import BATCH, Answer, Confinement, Job, receive_frame, send_frame

_PR_SET_NO_NEW_PRIVS = 38

Handler = Callable[[msgspec.Raw], object]


def confine(limits: Confinement) -> None:
    """Bound memory, files and priority, and tie this process's life to its parent's."""
    die_with_parent(limits.parent_pid)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.nice(limits.niceness)
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(what, (most, most))


def allow_cpu(seconds: float) -> None:
    """Let the kernel end this process should it compute that much longer, even if nobody is left to kill it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + seconds) + 1
    with contextlib.suppress(ValueError):  # the hard limit is lower: it holds by itself
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def answer(handlers: Mapping[str, Handler], job: Job) -> Answer:
    try:
        value = handlers[job.kind](job.payload)
        return Answer(msgspec.Raw(msgspec.msgpack.encode(value)))
    except HeadraceError as error:
        return Answer(error=error.code, message=error.message, param=error.param)
    except (MemoryError, RecursionError):
        return Answer(error="invalid_request", message="needs more memory than it may use", spent=True)
    except Exception as error:  # noqa: BLE001 - the top loop: ends exactly one job
        return Answer(error="internal_error", message=f"failed with {type(error).__name__}", spent=True)


def answer_batch(handlers: Mapping[str, Handler], payload: msgspec.Raw) -> list[Answer]:
    """One after the other, in their order. If one may have harmed this process, none counts: each is then tried alone."""
    answers = []
    for job in msgspec.msgpack.decode(payload, type=list[Job]):
        allow_cpu(job.cpu_s)
        answers.append(answer(handlers, job))
        if answers[-1].spent:
            raise MemoryError
    return answers


def serve(channel: socket.socket, limits: Confinement) -> None:
    # Imported here: under the limits, and before the parent starts to count a job's time.
    from headrace.text.former import Former
    from headrace.text.grammar_check import check_grammar
    from headrace.text.renderer import Renderer

    renderer = Renderer()
    handlers: dict[str, Handler] = {
        "render": renderer.render,
        "form": Former(renderer).form,
        "describe": renderer.describe,
        "validate": check_grammar,
    }
    handlers[BATCH] = partial(answer_batch, dict(handlers))
    decoder = msgspec.msgpack.Decoder(Job)
    send_frame(channel, b"ready")
    while (frame := receive_frame(channel, limits.max_job_bytes)) is not None:
        job = decoder.decode(frame)
        allow_cpu(job.cpu_s)
        result = answer(handlers, job)
        send_frame(channel, msgspec.msgpack.encode(result))
        if result.spent:
            return


def main() -> None:
    limits = msgspec.json.decode(sys.argv[1], type=Confinement)
    setproctitle("headrace: limited")
    confine(limits)
    channel = socket.socket(fileno=os.dup(0))
    # What a library prints or reads must not reach the channel.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(ConnectionError):
        serve(channel, limits)


if __name__ == "__main__":
    main()
