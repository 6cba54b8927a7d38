"""The text of tokens while they are committed: no broken characters, nothing twice, cut before a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specter.records import StopReason
from specter.text.tokenizer import Tokenizer

_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # decoders put it where the bytes of a character are incomplete
_MAX_PENDING = 16  # tokens without a complete character: the bytes are no UTF-8, whatever follows


class TextStream:
    """Token ids in, text out. The pieces joined are the text of all tokens, up to the first stop string.

    A character is held back until its last byte, and the beginning of a stop string until it is decided.

    Args:
        prompt: tokens before the first; a decoder treats the beginning of a text differently.
        stops: strings that end the text; they are not part of it.
        eos: ids that end the text; they have no text.

    Attributes:
        num_tokens: tokens received, up to the one that ended the text.
        stop_reason: why the text has ended; None before.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = (), eos: Collection[int] = ()
    ) -> None:
        self.num_tokens = 0
        self.stop_reason: StopReason | None = None
        self._decode = tokenizer.decode
        self._stops = [stop for stop in stops if stop]
        self._eos = frozenset(eos)
        # The tokens of the last piece, which the decoder needs before the pending ones; they end with a character.
        self._ids = list(prompt)
        self._num_read = len(self._ids)
        whole = read = self._decode(self._ids)
        while read.endswith(_PARTIAL) and not self._is_late():
            self._num_read -= 1
            read = self._decode(self._ids[: self._num_read])
        self._read = max(read, whole.rstrip(_PARTIAL), key=len)  # the last token may have a whole character, too
        self._held = ""  # may be the beginning of a stop string

    def add(self, tokens: Sequence[int]) -> str:
        """Receives committed tokens; returns the text that is certain now. Tokens behind the end are ignored."""
        return "".join(self._add(token) for token in tokens if self.stop_reason is None)

    def finish(self) -> str:
        """Returns what is held back at the end of the generation: there is no more to come."""
        if self.stop_reason == "stop":
            return ""
        text = self._cut(self._decode(self._ids)[len(self._read) :])
        held, self._held, self._ids, self._num_read, self._read = self._held, "", [], 0, ""
        return text + held

    def _add(self, token: int) -> str:
        self.num_tokens += 1
        if token in self._eos:
            self.stop_reason = "eos"
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._read) or (text.endswith(_PARTIAL) and not self._is_late()):
            return ""
        piece = text[len(self._read) :]
        self._ids = self._ids[self._num_read :]
        self._num_read, self._read = len(self._ids), self._decode(self._ids)
        return self._cut(piece)

    def _is_late(self) -> bool:
        return len(self._ids) - self._num_read >= _MAX_PENDING

    def _cut(self, piece: str) -> str:
        """The certain part of the held text and `piece`."""
        text = self._held + piece
        self._held = ""
        ends = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if ends:
            self.stop_reason = "stop"
            return text[: min(ends)]
        starts = (len(text) - n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        first = min(starts, default=len(text))
        self._held = text[first:]
        return text[:first]
