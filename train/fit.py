"""A run: recipe in; checkpoints, logs, scorer and run.json out. The same call again continues it.

OUT/run.json              recipe, versions, model, and at the end the held-out figures
OUT/checkpoints/          the two newest: weights, optimiser, place in the data
OUT/logs/                 TensorBoard and CSV, a folder for each start of the run
OUT/figures.csv           figures by step, layer, head and budget
OUT/scorer/               the trained scorer, for kvpop(scorer='OUT/scorer') and its like
OUT/model/                recipe distill: the trained model that it belongs to
"""

import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from kvpolicies.errors import UserError, caution
from kvpolicies.eval.study import locks as claims
from kvpolicies.files import make_folder, writing_folder
from kvpolicies.learned import saving
from kvpolicies.learned.base import config_for, relevant, sampled
from kvpolicies.learned.scorer import Scorer
from kvpolicies.models import loading
from kvpolicies.positions import check_positions
from kvpolicies.train import bounds, checkpoints, record, sources
from kvpolicies.train.data import Data
from kvpolicies.train.distill import Distill
from kvpolicies.train.module import Diverged, Frozen
from kvpolicies.train.recipe import Recipe

SCORER, MODEL = "scorer", "model"


def train(recipe: Recipe, resume: bool = False) -> dict[str, Any]:
    """Runs what is left of the recipe's steps; returns what run.json says at the end.

    Args:
        resume: refuse to begin a new run.

    Raises:
        UserError: for bad input, before a model is loaded where it can be known by then; for a
            folder that holds another run.
    """
    bounds.check_machine(recipe)
    bounds.device_of(recipe)
    out = Path(recipe.out)
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    known = record.check(recipe) if first else None
    if known and known.get("finished") and _is_whole(recipe):
        return known
    if first:
        claims.check_free(out)
    finished = bool(known and known.get("finished"))
    if (resume or finished) and (start := checkpoints.newest(out)) is None:
        raise UserError(
            f"{out}: the run is finished, but its scorer is gone or damaged, and so are its "
            "checkpoints: remove the folder to train anew"
            if finished
            else f"--resume: {out} holds no checkpoint to continue from"
        )
    if finished:
        caution(f"{out / SCORER}: gone, damaged or of an older version; made anew from {start}")
    loading.check_name(recipe.model)
    records = sources.find(recipe)
    distills = recipe.recipe == "distill"
    # What trains is kept in float32, and computed in 16 bits where the recipe says so.
    model, tokenizer = loading.load(recipe.model, "float32" if distills else recipe.dtype, "cpu")
    if records is not None:  # ledger problems are short
        check_positions(model, recipe.sequence, what="a document that fills a row")
    data = Data(sources.open_source(recipe, records, tokenizer), recipe)
    kind = Distill if distills else Frozen
    module = kind(model, new_scorer(recipe, model), recipe)
    if not first:
        return _run(recipe, model, tokenizer, module, data)
    make_folder(out, "--out")
    with claims.alone(out):
        known = record.begin(recipe, model, module.scorer)
        if known["finished"] and _is_whole(recipe):  # by another process, meanwhile
            return known
        return _run(recipe, model, tokenizer, module, data)


def _left(recipe: Recipe, step: int) -> str:
    """What is left of a run whose weights after `step` steps were of no use any more."""
    out = Path(recipe.out)
    kept = checkpoints.before(out, step)
    rest = "no checkpoint was written before" if kept is None else f"{kept} is from before"
    rates = f"lr {recipe.lr:g}" + f" and base_lr {recipe.base_lr:g}" * (recipe.recipe == "distill")
    return f"{rest}. Train below {rates}, or with a longer warmup, in another --out"


def _is_whole(recipe: Recipe) -> bool:
    """Whether what a finished run leaves is there, and says which weights it belongs to."""
    folder = Path(recipe.out) / SCORER
    try:
        scorer = Scorer.from_pretrained(folder) if folder.is_dir() else None
    except UserError:
        return False
    made = scorer is not None and "weights" in scorer.config.base
    return made and (recipe.recipe != "distill" or (Path(recipe.out) / MODEL).is_dir())


def _run(recipe: Recipe, model: Any, tokenizer: Any, module: Any, data: Data) -> dict[str, Any]:
    """The steps that are left, and what they end with."""
    out, distills = Path(recipe.out), recipe.recipe == "distill"
    known: dict[str, Any] = {}
    names, config = list(relevant(model)), module.scorer.config  # before a strategy wraps them
    trainer = make_trainer(recipe)
    began = time.perf_counter()
    start = checkpoints.newest(out)
    if start and trainer.is_global_zero:
        checkpoints.set_aside(out, start)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start and str(start))
        trainer.validate(module, datamodule=data, verbose=False)
    except SystemExit:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None
    except Diverged as error:
        raise UserError(f"{error}; {_left(recipe, error.step)}") from None
    weights = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        if distills:
            student = part_of(weights, "student.")
            with writing_folder(out / MODEL) as half:
                model.save_pretrained(half, state_dict=student)
                tokenizer.save_pretrained(half)
            base = {**config.base, "weights": sampled(student[name] for name in names)}
            config = replace(config, base=base)
        saving.write(out / SCORER, config, part_of(weights, "scorer."))
        seconds = time.perf_counter() - began
        known = record.finish(recipe, module.figures.means(), seconds)
    return known


def new_scorer(recipe: Recipe, model: Any) -> Scorer:
    """The recipe's scorer with its first weights, decided by the seed.

    Raises:
        UserError: for a model that is not supported, a scorer that no memory holds, or kvpop
            without xlstm.
    """
    config = config_for(
        model,
        recipe.kind,
        window=recipe.lag,
        delay=not recipe.at_entry,
        memory=recipe.memory,
        hidden=recipe.hidden,
        features=recipe.features,
        decay=recipe.ages,
    )
    bounds.check_scorer(recipe, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Scorer(config)


def part_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, which is left out."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def make_trainer(recipe: Recipe) -> lightning.Trainer:
    """Lightning's trainer for the recipe; it says nothing that is not about this run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", module=r"torch\.utils\.data.*")
    out, distills = Path(recipe.out), recipe.recipe == "distill"
    kind, _, number = recipe.device.partition(":")
    csv = CSVLogger(str(out / "logs"), name="csv", flush_logs_every_n_steps=recipe.log_every)
    kept = checkpoints.saving(out, recipe.checkpoint_every)
    board = TensorBoardLogger(str(out / "logs"), name="tensorboard")
    return lightning.Trainer(
        accelerator=kind,
        devices=[int(number)] if number else recipe.devices,
        strategy=recipe.strategy,
        precision="bf16-mixed" if distills and recipe.dtype == "bfloat16" else "32-true",
        max_steps=recipe.steps,
        accumulate_grad_batches=recipe.accumulate,
        val_check_interval=recipe.validate_every * recipe.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=recipe.log_every,
        logger=[csv, board],
        callbacks=[kept, TQDMProgressBar(refresh_rate=1)],
        default_root_dir=out,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
