"""Finds the form of a template's prompts, inside a limited process: what it writes around blanks. Owns the proof.

A form holds where the template ran over blanks and looked at none of them, and where filled blanks are what the
template itself renders, of the conversation at hand and of a few that templates like to look at.
"""

import re
from collections import OrderedDict
from typing import Any

import msgspec
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from headrace.text.blank import Blank, BlankEnvironment, Inspected, blind, blind_template, parts_of
from headrace.text.form import Form, contents_of
from headrace.text.renderer import MAX_TEMPLATES, CompiledTemplate, Renderer, as_transformers
from headrace.text.rendering import Formed, PackedJob, RenderJob, TemplateSource

# What stands for a blank while texts are split at special tokens: the first of these that nothing else is.
_STANDS = range(0x10FFFD, 0x10FF00, -1)
_MARKS = re.compile("[\ud800-\udfff]")
# Of a form, besides what it is filled with: many are kept where it is used.
MAX_LITERAL_CHARS = 16 << 10
_PROBES = (
    "x",
    "user",
    " \n<think>a</think>\n\nb <|im_end|></s>\n ",
    '{"name": "f", "parameters": {}} <tool_response>[INST] {{ 1 }} /no_think',
    "Ünïcode 例 0",
)


class BlankTemplate(CompiledTemplate):
    """Raises Inspected where a template looks at what it is given, or at the time."""

    def environment(self) -> ImmutableSandboxedEnvironment:
        environment = as_transformers(BlankEnvironment)
        blind(environment)
        return environment

    def rewrite(self, tree: nodes.Template) -> None:
        blind_template(tree)
        tree.set_lineno(1)
        assert tree.environment is not None
        tree.set_environment(tree.environment)

    def date(self, now_s: float, pattern: str) -> str:
        raise Inspected

    def form(self, job: RenderJob) -> Form:
        absent: set[str] = set()
        messages = [_said(message, Blank(absent, 2 * place)) for place, message in enumerate(job.messages)]
        parts = [part for written in self.written(job, messages) for part in parts_of(written)]
        literal = "".join([part for part in parts if isinstance(part, str)])
        if len(literal) > MAX_LITERAL_CHARS:
            raise Inspected
        stand = next(chr(point) for point in _STANDS if chr(point) not in literal)
        text = "".join([part if isinstance(part, str) else stand for part in parts])
        if self.marks.is_open(text, stand):
            raise Inspected
        blanks = iter([part for part in parts if isinstance(part, int)])
        pieces: list[int | list[str | int]] = []
        for piece in self.marks.split(text):
            if isinstance(piece, int):
                pieces.append(piece)
                continue
            between: list[str | int] = []
            for place, part in enumerate(piece.split(stand)):
                if place:
                    between.append(next(blanks))
                if part:
                    between.append(part)
            pieces.append(between)
        # What holds a mark is in no text.
        return Form(pieces, sorted(text for text in absent if not _MARKS.search(text)))


class Former:
    """Answers the job `form`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._jobs = msgspec.msgpack.Decoder(PackedJob)
        self._sources = msgspec.msgpack.Decoder(TemplateSource)
        # None: it has no forms.
        self._blank: OrderedDict[bytes, BlankTemplate | None] = OrderedDict()

    def form(self, payload: msgspec.Raw) -> Formed:
        job = self._jobs.decode(payload)
        packed = bytes(job.source)
        template = self._renderer.template(packed)
        pieces = self._renderer.rendered(template, job)
        contents = contents_of(job.messages)
        if contents is None or job.tools or job.variables:
            return Formed(pieces)
        try:
            blank = self._template(packed)
            form = None if blank is None else blank.form(job)
            is_proved = form is not None and _holds(form, template, job)
            if form is not None and form.fits(contents):
                is_proved = is_proved and form.fill(contents) == pieces
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - templates are other people's programs; most often it is Inspected
            return Formed(pieces)
        return Formed(pieces, form if is_proved else None)

    def _template(self, packed: bytes) -> BlankTemplate | None:
        if packed not in self._blank:
            self._blank[packed] = None
            if len(self._blank) > MAX_TEMPLATES:
                self._blank.popitem(last=False)
            self._blank[packed] = BlankTemplate(self._sources.decode(packed))
        return self._blank[packed]


def _holds(form: Form, template: CompiledTemplate, job: RenderJob) -> bool:
    """For texts that templates like to look at, each of them in the place of each message."""
    for turn in range(len(_PROBES)):
        contents = [_PROBES[(turn + place) % len(_PROBES)] for place in range(len(job.messages))]
        messages = [_said(message, text) for message, text in zip(job.messages, contents, strict=True)]
        if form.fits(contents) and template.render(replace(job, messages=messages)) != form.fill(contents):
            return False
    return True


def _said(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": text if isinstance(content, str) else [{**content[0], "text": text}]}
