r"""From an answer's text to tokens: one spelling for what LaTeX, Unicode and plain text write.

Nothing is thrown away but layout (`\left`, `\displaystyle`, thin spaces): what is not known here
becomes a token that no reader accepts, so that an answer is read whole or not at all.
"""

import functools
import re
from typing import NamedTuple


class Token(NamedTuple):
    """One sign of an answer."""

    kind: str
    """num, sym, const, fn, set, text, cmd, or op."""
    text: str
    spaced: bool = False
    """Whether a space comes before it."""


LONGEST = 1000  # characters; a longer answer is compared as it stands

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp max min gcd lcm "
    "asin acos atan".split()
)
UNIT_WORDS = frozenset(
    "cm mm km kg mg ml ft mi hr hrs min mins sec secs mph kph deg lb lbs oz yd am pm usd sq cu "
    "cents units unit inch feet foot days day year years".split()
)
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega "
    "varepsilon vartheta varphi varrho ell"
).split()

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "°": r"\degree ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∖": r"\setminus ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "…": r"\ldots ", "′": "'",
    "’": "'", "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,", "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ",
    **{letter: rf"\{name} " for letter, name in zip(
        "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΥΦΨΩ", _GREEK, strict=False)},
}  # fmt: skip
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))

_DROPPED = re.compile(
    r"\\(?:left|right|[Bb]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|hspace\{[^}]*\}"
    r"|middle|mathopen|mathclose|mathrel|boxed|fbox|underline)(?![A-Za-z])\s*\.?(?=\D|$)"
)
_SPACES = re.compile(r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~|\s")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
# Between groups of three digits: {,} or , with a negative space, or any space.
_GROUPED = re.compile(
    r"(?<![\d.^_/])(?<![\d.^_]\s)([1-9]\d{0,2})((?:\{,\}\d{3})+|(?:,\\!\s*\d{3})+"
    r"|(?:\\[,;: ]\d{3})+|(?:[ ~]\d{3})+)(?![\d])",
    re.ASCII,
)

_OPS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤",
    "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠",
    "neq": "≠", "approx": "≈", "in": "∈", "cup": "∪", "cap": "∩", "setminus": "∖",
    "backslash": "∖", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "lparen": "(", "rparen": ")", "vert": "|", "lvert": "|", "rvert": "|", "langle": "⟨",
    "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "degree": "°",
    "prime": "'", "colon": ":", "mid": "mid", "lor": "or", "land": "and", "vee": "or",
    "wedge": "and",
    "{": r"\{", "}": r"\}", "%": "%", "$": "$", "|": "‖", "\\": "newline",
}  # fmt: skip
_SAME_COMMAND = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom",
                 "tbinom": "binom"}  # fmt: skip
_TEXTS = frozenset(
    "text textbf textit textrm textnormal textsf mbox hbox mathrm mathsf mathit operatorname "
    "mathbf boldsymbol bm rm".split()
)
_DECORATIONS = frozenset(
    "overline bar vec hat tilde overrightarrow widehat angle triangle mathcal mathfrak".split()
)
_UNIT_LETTERS = frozenset("mgshlLNJWKVACF")
_BOLD = frozenset(("mathbf", "boldsymbol", "bm"))
_WORDS = {
    "pi": ("const", "pi"), "infinity": ("const", "oo"), "infty": ("const", "oo"),
    "inf": ("const", "oo"), "and": ("op", "and"), "or": ("op", "or"), "sqrt": ("cmd", "sqrt"),
    **{name: ("fn", name) for name in FUNCTIONS},
}  # fmt: skip
_LETTERS = {"e": ("const", "e"), "i": ("const", "i")}

_PIECE = re.compile(
    r"(?P<repeated>\d*\.\d*\\(?:overline|bar|dot)\s*(?:\{\d+\}|\d))"
    r"|(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:E[-+]?\d+|e\d+)|\d*\.\d+e[-+]?\d+|\d+(?:\.\d+)?|\.\d+)"
    r"|\\(?P<cmd>[A-Za-z]+|[^A-Za-z])|(?P<word>[A-Za-z]+)|(?P<cmp><=|>=)|(?P<sign>.)",
    re.ASCII | re.DOTALL,
)
_SEPARATOR = re.compile(r"[\s,;]*(and|or)[\s,]*", re.IGNORECASE)


def plain(source: str) -> str:
    """`source` with Unicode signs in LaTeX, layout and dollar delimiters removed."""
    text = "".join(_UNICODE.get(c, c) for c in source.strip())
    text = re.sub(f"[{''.join(_RAISED)}]+", lambda m: _script("^", m[0], _RAISED), text)
    text = re.sub(f"[{''.join(_LOWERED)}]+", lambda m: _script("_", m[0], _LOWERED), text)
    text = re.sub(r"^\*\*(.*)\*\*$", r"\1", text)
    text = re.sub(r"\\[()\[\]]", " ", text) if re.match(r"\\[(\[]", text) else text
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:  # in pairs they only mark mathematics
        text = re.sub(r"(?<!\\)\$", " ", text)
    text = _DEGREE.sub(r"\\degree ", _DROPPED.sub("", text))
    text = _GROUPED.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = text.replace("\\!", "").strip()
    return re.sub(r"(?<![\\])[.,;:]+$", "", text).removeprefix("=").strip()


def tokens(source: str) -> list[Token]:
    """All tokens of `source`, an answer or part of one."""
    return list(_scan(plain(source)))


@functools.lru_cache(maxsize=1 << 12)
def key(source: str) -> tuple[tuple[str, str], ...]:
    """What two spellings have in common if they differ in layout only."""
    return tuple((kind, text) for kind, text, _ in tokens(source))


def _script(mark: str, signs: str, table: dict[str, str]) -> str:
    return f"{mark}{{{''.join(table[s] for s in signs)}}}"


def _scan(text: str):
    at, spaced = 0, False
    while at < len(text):
        if space := _SPACES.match(text, at):
            at, spaced = space.end(), True
            continue
        match = _PIECE.match(text, at)
        assert match
        kind, found, at = match.lastgroup, match[match.lastgroup or 0], match.end()
        if kind == "cmd" and (found in _TEXTS or found in _DECORATIONS):
            content, at = _argument(found, text, at)
            made = _texts(found, content)
        elif kind == "cmd" and found in ("begin", "end", "mathbb"):
            content, at = _argument(found, text, at)
            made = [("set" if found == "mathbb" else found, content)]
        elif kind == "word":
            made = _letters(found, spaced)
        else:
            made = [_one(kind or "", found)]
        for part_kind, part in made:
            yield Token(part_kind, part, spaced)
            spaced = False


def _one(kind: str, found: str) -> tuple[str, str]:
    if kind in ("num", "repeated"):
        return "num", re.sub(r"\\(?:overline|bar|dot)\s*\{?(\d+)\}?", r"(\1)", found)
    if kind == "cmd":
        if found in _OPS:
            return "op", _OPS[found]
        if found in _GREEK:
            return "sym", found.removeprefix("var")
        if found in ("emptyset", "varnothing"):
            return "set", "empty"
        if found in ("pi", "infty") or found in FUNCTIONS:
            return _WORDS[found]
        if found in ("imath", "i"):
            return "const", "i"
        return "cmd", _SAME_COMMAND.get(found, found)
    if kind == "cmp":
        return "op", {"<=": "≤", ">=": "≥"}[found]
    return "op", found


def _letters(run: str, spaced: bool) -> list[tuple[str, str]]:
    """A run of letters: a name that is known, a word, or one symbol each."""
    if run in _WORDS:
        return [_WORDS[run]]
    if run.lower() in UNIT_WORDS or (len(run) >= 4 and spaced):
        return [("text", run)]
    return [_LETTERS.get(letter, ("sym", letter)) for letter in run]


def _texts(command: str, content: str) -> list[tuple[str, str]]:
    r"""The tokens of \text{content} and its like."""
    inner = re.sub(r"\s+", " ", _SPACES.sub(" ", content)).strip()
    if command in _DECORATIONS:
        return [("sym", f"{command} {inner}")]
    if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", inner)):  # no words: \text{5}
        return [(kind, text) for kind, text, _ in _scan(inner)]
    if separator := _SEPARATOR.fullmatch(inner):
        return [("op", separator[1].lower())]
    if command in _BOLD and len(inner) == 1:  # a vector's name, never the imaginary unit
        return [("sym", f"bold {inner}")]
    if inner in _LETTERS:
        return [_LETTERS[inner]]
    if inner in FUNCTIONS and (command == "operatorname" or inner not in UNIT_WORDS):
        return [("fn", inner)]
    if len(inner) == 1 and inner not in _UNIT_LETTERS:
        return [("sym", inner)]
    return [("text", inner)]


def _argument(command: str, text: str, at: int) -> tuple[str, int]:
    """What is in the braces at `at`, or the one sign there, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    if command == "rm" and (run := re.compile("[A-Za-z]+").match(text, at)):
        return run[0], run.end()
    if at >= len(text):
        return "", at
    if text[at] != "{":
        return text[at], at + 1
    depth, start = 0, at + 1
    while at < len(text):
        step = 2 if text[at] == "\\" else 1
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at], at + 1
        at += step
    return r"\unclosed", at
