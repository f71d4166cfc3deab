"""Characters that a stream's encoding lacks, spelled with those that it has: formulas stay readable in ASCII."""

from __future__ import annotations

import codecs
import contextlib
from typing import TextIO

SPELLED = {
    "·": "*", "×": "x", "²": "^2", "³": "^3", "ᵀ": "^T", "⁻": "^-", "¹": "1", "−": "-", "≤": "<=", "≥": ">=", "≠": "!=",
    "…": "...", "–": "-", "—": "-", "’": "'", "β": "beta", "→": "->", "←": "<-",
}  # fmt: skip
"""What else there is comes out as an escape, like \\xe9: it may be part of a file's name, where letters count."""

_HANDLER = "kda.spelled"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """The error handler: what to write in place of the characters from `error.start` on, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(SPELLED.get(letter) or ascii(letter)[1:-1] for letter in lacking), error.end


codecs.register_error(_HANDLER, _spell)


def spelled(text: str, encoding: str) -> str:
    """The text as a stream of that encoding shows it."""
    return text.encode(encoding, _HANDLER).decode(encoding)


def spell_out(stream: TextIO | None) -> None:
    """Let a stream spell out what its encoding lacks, where it would raise UnicodeEncodeError."""
    with contextlib.suppress(AttributeError):  # there may be no stream, or one that keeps text as it is
        stream.reconfigure(errors=_HANDLER)  # type: ignore[union-attr]
