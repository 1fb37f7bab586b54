"""Several statements as one: x = 1 or x = 2 gives x two values, 1 ± 2 is two numbers."""

from collections.abc import Sequence
from dataclasses import replace

from kvpolicies.eval.tasks.maths.answers import Answer, Joined, Known, Many, Named, Quantity, Sets
from kvpolicies.eval.tasks.maths.trees import signs

REALS = Known("R")


def alone(answer: Answer) -> Answer:
    """Plus-minus makes two."""
    if isinstance(answer, Named):
        return replace(answer, value=alone(answer.value))
    made = spread([answer])
    return made[0] if len(made) == 1 else Many("list", tuple(made))


def spread(answers: Sequence[Answer]) -> list[Answer]:
    """Plus-minus makes two of one entry."""
    found: list[Answer] = []
    for answer in answers:
        if isinstance(answer, Quantity):
            found += [Quantity(t, answer.unit, answer.letters) for t in signs(answer.tree)]
        elif isinstance(answer, Named) and isinstance(answer.value, Quantity):
            found += [replace(answer, value=value) for value in spread([answer.value])]
        else:
            found.append(answer)
    return found


def gathered(items: list[Answer], joint: str) -> Answer:
    """Several statements as one: x = 1 or x = 2 gives x two values."""
    names = [item.name if isinstance(item, Named) else "" for item in items]
    values = [_unnamed(item) for item in items]
    if not names[0] or not set(names) <= {names[0], ""}:
        distinct = all(names) and len(set(names)) == len(names)
        return Many("named" if distinct else "list", tuple(items))
    first = values[0]
    if isinstance(first, Joined) and first.sign == "∖" and not isinstance(values[1], Sets):
        values[1:] = [Joined("∖", REALS, Many("set", (value,))) for value in values[1:]]
    if not all(isinstance(value, Sets) for value in values):
        return Named(names[0], Many("list", tuple(values)))
    apart = REALS in values or any(isinstance(v, Joined) and v.sign == "∖" for v in values)
    if not joint and not apart:
        return Many("list", tuple(items))
    whole = values[0]
    for value in values[1:]:
        whole = Joined("∪" if joint == "or" else "∩", whole, value)
    return Named(names[0], whole)


def _unnamed(item: Answer) -> Answer:
    """Its value, unless it claims more than that."""
    return item.value if isinstance(item, Named) and not (item.equal or item.near) else item
