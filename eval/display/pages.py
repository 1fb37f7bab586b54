"""Pages and prose from Jinja templates: a name that a template misses is an error."""

from pathlib import Path
from typing import Any

from kvpolicies.eval.display.escape import visible


def render(template: Path, **context: Any) -> str:
    """A page from a template and what it includes beside it; every text is escaped, and visible."""
    return environment(template.parent).get_template(template.name).render(**context)


def environment(folder: Path) -> Any:
    """The templates of a folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )


def _finalized(value: Any) -> Any:
    return visible(value) if type(value) is str else value
