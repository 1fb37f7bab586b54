"""Random scorers whose choices vary, and a hub that has some of them for the tiny models.

A spec such as "kvpop(scorer='random/kvpop')" works in every test: the fixture `hub` of conftest.py
serves ids of the owner "random" from a folder, made on the spot.
"""

from pathlib import Path
from typing import Any

import torch

from kvpolicies.learned.base import config_for, fingerprint
from kvpolicies.learned.config import ScorerConfig
from kvpolicies.learned.scorer import Scorer
from kvpolicies.learned.statistics import FILE, QueryStatistics
from tests.support.models import tiny

WINDOW = 8
HUB: dict[str, dict[str, Any]] = {
    "kvpop": {"kind": "kvpop", "memory": 12},
    "kvpop_pre_rope": {"kind": "kvpop", "features": "pre_rope"},
    "kvpop_at_entry": {"kind": "kvpop", "delay": False, "decay": False},
    "kvpop_mlp": {"kind": "kvpop_mlp"},
    "dms": {"kind": "dms"},
    "trimkv": {"kind": "trimkv", "hidden": 32},
    "kvzap": {"kind": "kvzap"},
    "kvzap_mlp": {"kind": "kvzap", "hidden": 24},
    "fastkvzip": {"kind": "fastkvzip"},
}
# As they start, scorers find all tokens about equal. Here is how far apart these find them.
SPREAD = {"write": 0.3, "read": 0.5, "head": 0.5, "second": 0.3, "proj": 0.01, "first": 0.3}


def random_scorer(config: ScorerConfig, seed: int = 0) -> Scorer:
    """A scorer with weights as large as trained ones."""
    scorer = Scorer(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in scorer.named_parameters():
            part = next((p for p in name.split(".") if p in SPREAD), None)
            if part and not name.endswith("bias"):
                weight.normal_(0, SPREAD[part], generator=g)
            elif name.startswith("ages"):
                weight.fill_(-4.0)
            elif name.endswith("second.bias"):
                weight.fill_(1.0)  # trimkv's gates start where all keep
    return scorer


def small(kind: str, **options: Any) -> ScorerConfig:
    """A config without a model: two layers, two heads."""
    sizes: dict[str, Any] = {
        "layers": (0, 1),
        "heads": 2,
        "head_dim": 8,
        "input_size": 16,
        "groups": 2 if kind == "fastkvzip" else 0,
        "window": WINDOW,
    }
    return ScorerConfig(kind=kind, **{**sizes, **options})


def save_statistics(
    file: Path, base: dict[str, Any], layers: tuple[int, ...], heads: int, groups: int, dim: int
) -> None:
    """Random statistics of a model that rotates all numbers of a head."""
    g = torch.Generator().manual_seed(0)
    mean = {y: torch.randn(heads, groups, dim, generator=g) for y in layers}
    more = {y: torch.rand(heads, groups, dim // 2, generator=g) for y in layers}
    size = {y: torch.hypot(*m.chunk(2, dim=-1)) + more[y] for y, m in mean.items()}
    QueryStatistics(base, layers, 1, mean, size).save(file)


def download(root: Path, name: str, **__: Any) -> str:
    """What stands for `huggingface_hub.snapshot_download`: the folder of "random/..."."""
    owner, _, scorer = name.partition("/")
    if owner != "random":
        raise OSError("no network in tests")
    folder = root / scorer
    if scorer == "triattention":
        save_statistics(folder / FILE, fingerprint(tiny()), (0, 1), 2, 2, 16)
    elif not folder.is_dir():
        options = {"window": WINDOW, **HUB[scorer]}
        kind = options.pop("kind")
        random_scorer(config_for(tiny(), kind, **options)).save_pretrained(folder)
    return str(folder)
