"""Pages and prose from Jinja templates: a name that a template misses is an error."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvpolicies.eval.display.escape import visible


def render(template: Path, **context: Any) -> str:
    """A page from a template and what it includes beside it; every text is escaped, and visible."""
    return environment(template.parent).get_template(template.name).render(**context)


@cache
def macros(template: Path, **filters: Callable[[Any], str]) -> Any:
    """Sentences: each macro of a template as a function that returns plain text, not escaped."""
    made = environment(template.parent, page=False)
    made.filters.update(filters)
    return made.get_template(template.name).module


def environment(folder: Path, page: bool = True) -> Any:
    """The templates of a folder, whose values are escaped for a page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized if page else None,
    )


def _finalized(value: Any) -> Any:
    return visible(value) if type(value) is str else value
