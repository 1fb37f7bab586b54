"""Any text, made fit to stand on a page: what a model writes may hold every character there is.

Markup is escaped by the template; this is about characters that would not show, or would rearrange
what stands around them.
"""

import re

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with control, direction and half characters as signs that are seen.

    NUL to US become their pictures (U+2400 and on), halves of surrogate pairs U+FFFD, others their
    number: ‹U+202E›. Line feeds and tabs stay.
    """
    return _HIDDEN.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if 0xD800 <= code < 0xE000 else f"‹U+{code:04X}›"
