"""Figures of held-out rows by layer, budget and head: their means, and figures.csv."""

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvpolicies import files
from kvpolicies.learned.config import ScorerConfig
from kvpolicies.train.objective import FIGURES
from kvpolicies.train.recipe import Recipe

NAME = "figures.csv"
HEADER = ("step", "layer", "head", "budget", *FIGURES)


class HeldOutFigures:
    """Sums until `close`, then means; rows count the same, whichever device they were on."""

    def __init__(self, recipe: Recipe, config: ScorerConfig):
        self.recipe, self.layers = recipe, list(config.layers)
        shape = (len(config.layers), len(recipe.budget), config.heads, len(FIGURES))
        self._sums, self._counts = torch.zeros(2, *shape, dtype=torch.float64)
        self.table = torch.full(shape, float("nan"), dtype=torch.float64)
        """[layers, budgets, H, FIGURES], NaN where nothing could be asked."""

    def add(self, layer: int, row: Tensor) -> None:
        """Figures [budgets, H, FIGURES] of one row at one layer."""
        row = row.cpu()
        self._sums[self.layers.index(layer)] += row.nan_to_num(0.0)
        self._counts[self.layers.index(layer)] += ~row.isnan()

    def close(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Makes the means of what was added; `total` sums a tensor over devices."""
        both = total(torch.stack([self._sums, self._counts]).to(device)).cpu()
        self.table = both[0] / both[1]
        self._sums.zero_()
        self._counts.zero_()

    def means(self) -> dict[str, float]:
        """Over layers, heads and budgets, and of each budget where there are several."""
        found = {}
        for index, name in enumerate(FIGURES):
            found[name] = self.table[..., index].nanmean().item()
            for at, budget in enumerate(self.recipe.budget):
                if len(self.recipe.budget) > 1 and name != "spearman":
                    found[f"{name}@{budget}"] = self.table[:, at, :, index].nanmean().item()
        return {name: value for name, value in found.items() if value == value}

    def write(self, step: int) -> None:
        """Appends the table to figures.csv; what it held of this step or later is replaced."""
        path = Path(self.recipe.out) / NAME
        lines = []
        if path.exists():
            known = csv.reader(files.read_lines(path))
            lines = [line for line in list(known)[1:] if int(line[0]) < step]
        for at, layer in enumerate(self.layers):
            for number, budget in enumerate(self.recipe.budget):
                for head, row in enumerate(self.table[at, number].tolist()):
                    where = (step, layer, head, budget)
                    lines.append([*map(str, where), *(f"{x:.4f}" for x in row)])
        files.make_folder(path.parent)
        files.write_csv(path, [HEADER, *lines])
