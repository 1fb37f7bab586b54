"""What griffe, which reads docstrings for the site, cannot see by itself in this repository.

The folder kernels/ has no __init__.py on purpose (CONTRIBUTING.md), so that griffe passes over it;
and jaxtyping's shapes, `Float[Tensor, "B n"]`, are strings that it takes for expressions where it
can. Named in mkdocs.yml.
"""

from pathlib import Path
from typing import Any

import griffe

SHAPED = {"Float", "Int", "Bool", "Shaped"}


class Rooms(griffe.Extension):
    """Reads kernels/ as a package, and leaves the shapes of tensors as they are written."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        """Adds `kvpolicies.kernels` to the package."""
        folder = Path(str(pkg.filepath)).parent / "kernels"
        collections: dict[str, Any] = {
            "lines_collection": loader.lines_collection,
            "modules_collection": loader.modules_collection,
        }
        room = griffe.Module("kernels", filepath=folder / "__init__.py", parent=pkg, **collections)
        pkg.set_member("kernels", room)
        for file in sorted(folder.glob("*.py")):
            code = file.read_text(encoding="utf-8")
            loader.lines_collection[file] = code.splitlines()
            module = griffe.visit(
                file.stem,
                filepath=file,
                code=code,
                parent=room,
                docstring_parser=loader.docstring_parser,
                docstring_options=loader.docstring_options,
                **collections,
            )
            room.set_member(file.stem, module)

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        """Quotes the shapes in an object's annotations."""
        for expression in _annotations(obj):
            for part in expression.iterate(flat=False):
                _quote(part)
            _quote(expression)


def _annotations(obj: Any) -> list[Any]:
    """The expressions that tell the types of a function or attribute."""
    found = [getattr(obj, name, None) for name in ("annotation", "returns", "value")]
    found += [parameter.annotation for parameter in getattr(obj, "parameters", ())]
    return [one for one in found if isinstance(one, griffe.Expr)]


def _quote(part: Any) -> None:
    if isinstance(part, griffe.ExprSubscript) and str(part.left) in SHAPED:
        shape = part.slice.elements[1]  # type: ignore[union-attr]
        part.slice.elements[1] = '"' + str(shape).strip("'\"") + '"'  # type: ignore[union-attr]
