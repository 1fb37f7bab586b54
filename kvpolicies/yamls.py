"""YAML as people write it: plain values, each key once, and one line for whatever is wrong."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvpolicies.errors import UserError, cut, is_text, reason, shown
from kvpolicies.files import read_bytes

_WHOLE = "tag:yaml.org,2002:int"
_MOST_VALUES = 100_000
"""Of a file: aliases of aliases could make any number of a few lines."""


def read_yaml(path: str | Path) -> Any:
    """The contents of a YAML file; an empty one is an empty mapping.

    Raises:
        UserError: no such file, no valid YAML (naming the line), a key given twice, or more than
            `_MOST_VALUES` values once its aliases are followed.
    """
    text = read_bytes(path)
    try:
        content = yaml.load(text, _Reader)
        _check_size(content)
    # Constructors of odd tags (`!!int ''`, `!!bool maybe`) raise what int() and dicts do.
    except (
        yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f" at line {line + 1}"
        why = getattr(error, "problem", None) or getattr(error, "reason", None)
        why = cut(str(why)) if why else reason(error)
        raise UserError(f"{cut(str(path))}: no valid YAML{place} ({why})") from None
    return {} if content is None else content


class _Reader(yaml.SafeLoader):
    """A key given twice is an error; whole numbers are decimal, where YAML 1.1 reads 040 as 32."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if tag != _WHOLE]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        """Constructs a mapping once its keys have been looked at."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text, not a list or a mapping", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key.value)} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver(
    _WHOLE, re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$"), list("-+0123456789")
)


def _check_size(content: Any) -> None:
    todo, count = [content], 0
    while todo:
        value = todo.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES:,} values")
        if isinstance(value, int) and value.bit_length() > 1000:  # no float holds it
            raise ValueError(f"a number of {len(str(value)):,} digits")
        if isinstance(value, str) and not is_text(value):
            raise ValueError("half of a surrogate pair is no text")
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            todo += value
