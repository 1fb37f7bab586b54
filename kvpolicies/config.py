"""From YAML and the command line to frozen dataclasses, and the deployment config itself.

A config class is a frozen dataclass whose fields carry `metadata={"help": ...}`; its command line
options, its YAML keys and its errors all follow from that.
"""

import argparse
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvpolicies.budget import KV_DTYPES, BudgetSpec
from kvpolicies.errors import UserError, nearest, shown
from kvpolicies.models.form import Form
from kvpolicies.options import option
from kvpolicies.yamls import read_yaml as read_yaml

Config = TypeVar("Config")

MODES = ("eager", "fixed", "graph", "compiled")
"""How decode steps run (fixed.py). `eager`: what is filled, as it is; `fixed`: fixed shapes, run
eagerly; `graph`: these in a CUDA graph; `compiled`: these by torch.compile, on a GPU in a graph."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of weights and cache."""
KERNELS = ("auto", "torch", "triton")
"""What runs kernels: `kernels.backend.CHOICES`, which a test compares; that one imports torch."""


@dataclass(frozen=True)
class Deployment(Form):
    """What a deployment runs: one YAML for `generate` and whatever else decodes.

    Raises:
        UserError: for a value that cannot be, an unknown policy, an impossible budget.
    """

    model: str = option("embedded", "embedded, smollm2, a hub id, a folder, or gguf:FILE")
    policy: str = option("beacon", "policy with options, such as beacon(n_beacon=8)")
    budget: str = option("1024", "slots of a KV head, or a share of prompt + new tokens (25%%)")
    sinks: int | str | None = option(
        None, "first tokens that are never evicted, or prompt: all of the prompt; default 4"
    )
    window: int | None = option(
        None, "newest tokens that are never evicted; default 32, or total/4"
    )
    layers: str | None = option(
        None, "how layers share the budget: even, pyramid, or a file of revisit --profile"
    )
    kv_dtype: str | None = option(
        None,
        f"keys and values are stored in: {', '.join(KV_DTYPES)}; default auto, the model's dtype",
        choices=KV_DTYPES,
    )
    max_new_tokens: int = option(512, "most new tokens a prompt", least=1)
    max_length: int | None = option(
        None,
        "in serve, most tokens of a prompt and its answer; default: what the model takes",
        least=2,
    )
    batch_size: int = option(8, "rows decoded at once", least=1)
    temperature: float = option(0.0, "0 decodes greedily")
    top_p: float = option(1.0, "nucleus of sampling")
    top_k: int = option(0, "sampling among the k likeliest; 0 = off")
    seed: int = option(0, "of sampling and of the random policy")
    dtype: str = option("float32", f"of weights and cache: {', '.join(DTYPES)}", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda")
    step: str = option(
        "auto", "decode steps: auto, eager, fixed, graph (CUDA), compiled", choices=("auto", *MODES)
    )
    kernels: str = option("auto", "auto, torch, triton (which needs a GPU)", choices=KERNELS)

    def __post_init__(self) -> None:
        super().__post_init__()
        from kvpolicies.registry import check
        from kvpolicies.sampling import Sampling

        check(self.policy)  # all but values that only the policy's class knows, which takes torch
        object.__setattr__(self, "budget", self.budget_spec.text)
        Sampling(self.temperature, self.top_p, self.top_k, self.seed)

    @property
    def budget_spec(self) -> BudgetSpec:
        """The budget with its sinks, window, layers and bits."""
        return BudgetSpec(self.budget, self.sinks, self.window, self.layers, self.kv_dtype)


def from_mapping(cls: type[Config], mapping: Any, where: str) -> Config:
    """Builds a config from a mapping.

    Raises:
        ValueError: for an unknown key (naming the nearest), a value of the wrong kind, or what the
            class itself refuses; each names `where`.
    """
    return _made(cls, mapping, where, {})


def load_yaml(cls: type[Config], path: str | Path) -> Config:
    """Reads a config from a YAML file.

    Raises:
        ValueError: as `read_yaml` and `from_mapping`, with the file's name.
    """
    return from_mapping(cls, read_yaml(path), str(path))


def shipped(folder: Path) -> list[str]:
    """Names of the YAML files that come with the package in a folder."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def find_yaml(name: str, folder: Path, kind: str) -> Path:
    """A YAML file by its path, or by the name of one of the package's in `folder`.

    Raises:
        UserError: there is neither (naming the nearest); `kind` says what was looked for.
    """
    if Path(name).is_file():
        return Path(name)
    if name in shipped(folder):
        return folder / f"{name}.yaml"
    raise UserError(
        f"{kind} {name}: no such file, and no {kind} of the package: "
        f"{nearest(name, shipped(folder))}"
    )


def dump_yaml(config: Any) -> str:
    """YAML that `load_yaml` reads back to an equal config."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """One option per field, inherited ones last; none given means None: a file's value is kept."""
    inherited = {f.name for base in cls.__mro__[1:] if is_dataclass(base) for f in fields(base)}
    for f in sorted(fields(cls), key=lambda f: f.name in inherited):
        default = f"(default: {_shown(f)})" if _shown(f) else ""
        parser.add_argument(
            _flag(f.name),
            dest=f.name,
            metavar=f.name.upper(),
            help=f"{f.metadata.get('help', '')} {default}".strip(),
        )


def from_args(
    cls: type[Config], args: argparse.Namespace, values: Any = None, where: str = ""
) -> Config:
    """The config that the command line gives, over a file's `values` where no option was given.

    Only what comes out of both is checked, so that an option can mend what a file alone would lack.

    Raises:
        ValueError: as `from_mapping`, whose `where` is the file; an option that is empty.
    """
    given = {
        f.name: value
        for f in fields(cls)  # type: ignore[arg-type]
        if (value := getattr(args, f.name, None)) is not None
    }
    for name, value in given.items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{_flag(name)}: empty; leave the option out for its default")
    return _made(cls, {} if values is None else values, where, given)


def _made(cls: type[Config], values: Any, where: str, given: Mapping[str, Any]) -> Config:
    """A config of a file's `values` and of what is `given` as options, which win."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected keys and values, got {type(values).__name__}")
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    converted = {}
    for key, value in {**values, **given}.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
        named = _flag(key) if key in given else f"{where}: {key}"
        converted[key] = _converted(value, hints[key], named)
    try:
        return cls(**converted)
    except UserError as error:
        if not where:
            raise
        beside = f" with {', '.join(map(_flag, given))}" if given else ""
        raise UserError(f"{where}{beside}: {error}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def split_list(text: str) -> list[str]:
    """Splits at commas outside of brackets: `"beacon(a=1,b=2),random"` has two items."""
    items, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    return [item.strip() for item in (*items, text[start:]) if item.strip()]


def _shown(f: Field) -> str:
    empty = f.default is MISSING or f.default is None or f.default in ("", ())
    return "" if empty else str(f.default).replace("%", "%%")


def _converted(value: Any, hint: Any, what: str) -> Any:
    """`value`, from YAML or from a command line's text, as the field's type."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        *others, hint = (h for h in typing.get_args(hint) if h is not type(None))
        for other in others:
            with suppress(UserError):
                return _converted(value, other, what)
    if typing.get_origin(hint) in (tuple, list):
        parts = split_list(value) if isinstance(value, str) else value
        if not isinstance(parts, Sequence):
            parts = [parts]
        if not parts:
            raise UserError(f"{what}: empty; leave it out for its default")
        inner = typing.get_args(hint)[0]
        return typing.get_origin(hint)(_converted(v, inner, what) for v in parts)
    return _scalar(value, hint, what)


def _scalar(value: Any, kind: type, what: str) -> Any:
    wrong = UserError(f"{what}: expected {_named(kind)}, got {shown(value)}")
    if kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            if "\0" in str(value):
                raise UserError(f"{what}: a null character is no text")
            return str(value)
        raise wrong
    if kind is bool:
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            return value if isinstance(value, bool) else value.lower() == "true"
        raise wrong
    if kind in (int, float) and not isinstance(value, bool):
        # Python reads digits of any script; whoever checks a file by eye does not.
        if isinstance(value, str) and not value.isascii():
            raise wrong
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
        if number == number and (isinstance(value, str) or number == value):
            return number
    raise wrong


def _named(kind: type) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, str(kind))
