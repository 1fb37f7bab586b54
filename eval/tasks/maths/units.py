"""Units: what is written after a number, and which spellings mean one unit."""

import re

# A line a unit: its name, then how else it is written.
_SPELLINGS = """
cm centimeter centimetre
mm millimeter millimetre
m meter metre
km kilometer kilometre
in inch inche
ft foot feet
yd yard
mi mile
kg kilogram
g gram gm
mg milligram
lb pound
oz ounce
l liter litre
ml milliliter millilitre
s sec second
min minute
h hr hour
day
am
pm
wk week
yr year
mph
kph kmph
degree deg °
$ dollar usd buck
€ euro eur
£ gbp
cent ¢
radian rad
unit
"""
_NAMES = {
    spelling: words[0]
    for words in map(str.split, _SPELLINGS.strip().splitlines())
    for spelling in words
}
_WHOLE = {"radian": "", "mi/h": "mph", "km/h": "kph"}
# After a number they say more than what is counted.
_NO_UNIT = frozenset(
    "not no non none if when where for mod modulo more less than least most base remainder plus "
    "minus times over under squared cubed wrong and or but is are isn't to from of between either "
    "neither only except about maybe in^-1 divided multiplied root sqrt pi i e x y z n k "
    "negative incorrect false true unknown approx half halves third thirds quarter quarters "
    "fourth fourths fifth fifths sixths eighths tenths hundredths thousandths factorial double "
    "twice".split()
)
MULTIPLES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
PERCENT = frozenset(("percent", "percentage", "pct", "per cent"))


def unit(text: str) -> str | None:
    """One spelling of the unit that `text` names; None if it says something else.

    Powers are digits: "square cm", "cm^2" and "sq. centimeters" are all "cm2".
    """
    lowered = text.casefold().strip(" .,;")
    words = re.findall(r"[^\W\d_]+|[°$€£¢]|\d|[/^{}*\s.-]|.", lowered)
    if any(word in _NO_UNIT for word in words) or re.search(r"[^\w°$€£¢/^{}*\s.-]|\s\d", lowered):
        return None
    if lowered.isalpha() and len(lowered) == 2 and lowered not in _NAMES:  # 3xy
        return None
    found: list[str] = []
    power = ""
    for word in words:
        if word in ("square", "sq", "cubic", "cu"):
            power = "2" if word[0] == "s" else "3"
        elif word in ("per", "/") or word.isdigit():
            found.append(word.replace("per", "/"))
        elif word.isalpha() or word in "°$€£¢":
            found.append(_name(word) + power)
            power = ""
    named = "".join(found)
    return _WHOLE.get(named, named) if named else None


def compatible(one: str, other: str) -> bool:
    """Whether two units may be one: one is not given, or says no more than "units"."""
    plain = {name.rstrip("0123456789") in ("", "unit") for name in (one, other)}
    return one == other or True in plain


def _name(word: str) -> str:
    single = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return _NAMES.get(word) or _NAMES.get(single, single)
