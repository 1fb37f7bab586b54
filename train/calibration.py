"""What a calibration is asked: one frozen dataclass, which is the command's options."""

from dataclasses import dataclass

from kvpolicies.config import DTYPES
from kvpolicies.models.form import Form
from kvpolicies.options import option
from kvpolicies.train.recipe import Recipe


@dataclass(frozen=True)
class Calibration(Form):
    """Which model's queries over which text, and where their statistics go (`out`)."""

    model: str = option("embedded", "embedded, smollm2, a hub id, a folder, or gguf:FILE")
    data: str = option("ledger", "ledger, JSON lines, a folder, or a hub id")
    split: str = option("train", "of a folder or hub id")
    subset: str = option("", "configuration of a hub id")
    stream: bool = option(False, "read a hub id as it arrives instead of downloading it first")
    columns: tuple[str, ...] = option(
        (), "text columns in order, or one of messages; default: those of known names"
    )
    documents: int = option(32, "documents at most", least=1)
    length: int = option(4096, "of each its first tokens, so many at most", least=2)
    seed: int = option(0, "of the order of documents", least=0)
    dtype: str = option("float32", f"of weights: {', '.join(DTYPES)}", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda")
    out: str = option("results/statistics.safetensors", "the file to write")

    @property
    def data_of(self) -> Recipe:
        """The data as a recipe names it, whose reader is used."""
        names = ("model", "data", "split", "subset", "stream", "columns", "seed", "template",
                 "wrapper", "thinking", "special_tokens")  # fmt: skip
        return Recipe(**{name: getattr(self, name) for name in names}, held_out=1)
