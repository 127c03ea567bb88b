"""Text of one stream from its ids, as they come. Owns the bytes of a character that is not whole yet.

Never half a character, never a retraction; all deltas together are the decoded text of all ids.
The state follows from the ids alone: to rebuild it after a failover, push what was emitted before.
Knows neither stop strings nor where the ids come from.

Bytes that are no UTF-8 become U+FFFD: in byte-level vocabularies one per longest broken start of a
character, as in every UTF-8 decoder; in SentencePiece ones one per byte, as in SentencePiece.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable

from headrace.core.errors import InvalidModel
from headrace.text.tokens import Spelling, TokenTable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """`continues`: the ids carry on a text that the reader has, so a space at their start is meant.
    `show`: control ids to write out nevertheless, for a tool syntax that begins with one."""

    def __init__(self, table: TokenTable, *, continues: bool = False, show: Iterable[int] = ()) -> None:
        if table.spelling is Spelling.OPAQUE:
            raise InvalidModel("The model's vocabulary cannot be turned back into text token by token.")
        self._table = table
        self._show = frozenset(show) & table.control_ids
        self._strips = table.strips_space and not continues
        self._is_byte_level = table.spelling is Spelling.BYTE_LEVEL
        # Characters of each id, where nothing but an unfinished one before it could change them.
        self._whole = table.whole if self._is_byte_level and not self._strips and not self._show else None
        # Made for the first id that is more, or less, than whole characters.
        self._utf8: IncrementalDecoder | None = None
        self._held = bytearray()

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. An id outside the vocabulary has none."""
        text = self._decode(ids) if self._is_byte_level else self._decode_pieces(ids)
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text

    def push_one(self, token: int) -> str:
        """`push` of a single id; most ids of most streams come one by one."""
        whole, utf8 = self._whole, self._utf8
        if whole is not None and 0 <= token < len(whole) and (utf8 is None or not utf8.getstate()[0]):
            text = whole[token]
            if text is not None:
                return text
        return self.push((token,))

    def finish(self) -> str:
        """What is left of a character that was never completed."""
        if self._is_byte_level:
            return "" if self._utf8 is None else self._utf8.decode(b"", final=True)
        text = self._give_up()
        self._strips = self._strips and not text
        return text

    def _decode(self, ids: Iterable[int]) -> str:
        if self._utf8 is None:
            self._utf8 = _Utf8Decoder("replace")
        return self._utf8.decode(b"".join([self._bytes(token) for token in ids]))

    def _bytes(self, token: int) -> bytes:
        table = self._table
        if not 0 <= token < table.size:
            return b""
        return table.bytes_of[token] if token in self._show else table.shown[token]

    def _decode_pieces(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token in ids:
            data = self._bytes(token)
            if token in self._table.byte_ids:
                self._held += data
                parts.append(self._take_characters())
            elif data:
                # A piece is whole characters: what the bytes before it began will not be completed.
                parts.append(self._give_up())
                parts.append(data.decode())
        return "".join(parts)

    def _take_characters(self) -> str:
        """What the held bytes spell; they are never more than an unfinished character and one byte."""
        parts: list[str] = []
        while self._held:
            try:
                parts.append(self._held.decode())
                self._held.clear()
            except UnicodeDecodeError as error:
                if error.end == len(self._held) and error.reason == "unexpected end of data":
                    break
                parts.append(REPLACEMENT)
                del self._held[0]
        return "".join(parts)

    def _give_up(self) -> str:
        text = REPLACEMENT * len(self._held)
        self._held.clear()
        return text
