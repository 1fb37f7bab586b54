"""A run: recipe in; checkpoints, logs, scorer and run.json out. The same call again continues it.

OUT/run.json              recipe, versions, model, and at the end the held-out figures
OUT/checkpoints/          the newest checkpoint: weights, optimiser, place in the data
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
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.eval import claims, models
from kvpolicies.eval.provenance import make_folder
from kvpolicies.learned import saving
from kvpolicies.learned.base import config_for, relevant, sampled
from kvpolicies.learned.scorer import Scorer
from kvpolicies.positions import check_positions
from kvpolicies.train import record, sources
from kvpolicies.train.data import Data
from kvpolicies.train.distill import Distill
from kvpolicies.train.module import Frozen
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
    out = Path(recipe.out)
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    known = record.check(recipe) if first else None
    if known and known.get("finished"):
        return known
    if first:
        claims.check_free(out)
    if resume and newest(out) is None:
        raise UserError(f"--resume: {out} holds no checkpoint to continue from")
    models.check_name(recipe.model)
    records = sources.find(recipe)
    distills = recipe.recipe == "distill"
    # What trains is kept in float32, and computed in 16 bits where the recipe says so.
    model, tokenizer = models.load(recipe.model, "float32" if distills else recipe.dtype, "cpu")
    if records is not None:  # ledger problems are short
        check_positions(model, recipe.sequence, what="a document that fills a row")
    data = Data(sources.open_source(recipe, records, tokenizer), recipe)
    kind = Distill if distills else Frozen
    module = kind(model, new_scorer(recipe, model), recipe)
    if not first:
        return _run(recipe, model, tokenizer, module, data)
    make_folder(out)
    with claims.alone(out):
        known = record.begin(recipe, model, module.scorer)
        if known["finished"]:  # by another process, meanwhile
            return known
        return _run(recipe, model, tokenizer, module, data)


def _run(recipe: Recipe, model: Any, tokenizer: Any, module: Any, data: Data) -> dict[str, Any]:
    """The steps that are left, and what they end with."""
    out, distills = Path(recipe.out), recipe.recipe == "distill"
    known: dict[str, Any] = {}
    names, config = list(relevant(model)), module.scorer.config  # before a strategy wraps them
    trainer = make_trainer(recipe)
    began = time.perf_counter()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=newest(out))
    except SystemExit:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None
    trainer.validate(module, datamodule=data, verbose=False)
    weights = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        if distills:
            student = part_of(weights, "student.")
            model.save_pretrained(out / MODEL, state_dict=student)
            tokenizer.save_pretrained(out / MODEL)
            base = {**config.base, "weights": sampled(student[name] for name in names)}
            config = replace(config, base=base)
        saving.write(out / SCORER, config, part_of(weights, "scorer."))
        seconds = time.perf_counter() - began
        known = record.finish(recipe, module.figures.means(), seconds)
    return known


def new_scorer(recipe: Recipe, model: Any) -> Scorer:
    """The recipe's scorer with its first weights, decided by the seed.

    Raises:
        UserError: for a model that is not supported, or kvpop without xlstm.
    """
    config = config_for(
        model,
        recipe.kind,
        window=recipe.delay,
        delay=not recipe.at_entry,
        memory=recipe.memory,
        hidden=recipe.hidden,
        features=recipe.features,
        decay=recipe.ages,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Scorer(config)


def part_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, which is left out."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def newest(out: Path) -> str | None:
    """The checkpoint of the most steps, if there is one."""
    found = sorted((out / "checkpoints").glob("step=*.ckpt"), key=_steps)
    return str(found[-1]) if found else None


def _steps(path: Path) -> int:
    digits = path.stem.removeprefix("step=")
    return int(digits) if digits.isdigit() else -1


def make_trainer(recipe: Recipe) -> lightning.Trainer:
    """Lightning's trainer for the recipe; it says nothing that is not about this run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", module=r"torch\.utils\.data.*")
    out, distills = Path(recipe.out), recipe.recipe == "distill"
    kind, _, number = recipe.device.partition(":")
    csv = CSVLogger(str(out / "logs"), name="csv", flush_logs_every_n_steps=recipe.log_every)
    board = TensorBoardLogger(str(out / "logs"), name="tensorboard")
    checkpoints = ModelCheckpoint(
        out / "checkpoints",
        filename="{step}",
        every_n_train_steps=recipe.checkpoint_every,
        save_on_train_epoch_end=False,
    )
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
        callbacks=[checkpoints, TQDMProgressBar(refresh_rate=1)],
        default_root_dir=out,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
