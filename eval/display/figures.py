"""Figures: the colours of a page, light and dark, a canvas, and PNGs that are written whole."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicies import files

MARKERS = "osD^vP*Xph<>"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8172B3", "#937860")
"""Told apart by colour-blind readers, on white and on dark (after Okabe and Ito)."""
DASHES = ("", "7 3", "2 3")
"""Of lines, where there are more than colours."""
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "grid": "#d8dee4"}
DARK = {"paper": "#161b22", "ink": "#e6edf3", "grid": "#30363d"}


def new_figure(
    size: tuple[float, float] = (8.2, 4.6),
    dpi: int = 140,
    colours: Mapping[str, str] = LIGHT,
) -> Any:
    """An empty figure of matplotlib's, `size` in inches, that no window knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained", facecolor=colours["paper"])
    FigureCanvasAgg(figure)
    return figure


def data_uri(path: Path) -> str:
    """A PNG as text that stands inside a page."""
    return "data:image/png;base64," + base64.b64encode(files.read_bytes(path)).decode()


def save(figure: Any, path: Path, paper: str) -> None:
    """Writes a figure as PNG, whole or not at all."""
    made = io.BytesIO()
    figure.savefig(made, format="png", facecolor=paper, metadata={"Software": None})
    files.write_bytes(path, made.getvalue())
