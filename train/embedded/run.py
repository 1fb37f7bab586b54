"""Recreate the embedded model from a seed: a 0.6 M parameter Qwen3 trained on ledger traces.

    python -m kvpolicies.train.embedded.run --out runs/embedded

Notable: a short stage of bare look-ups comes first, then traces whose plans grow; the loss reads
trace tokens only; Muon moves the matrices, AdamW the embedding and the norms. Attention starts
sharp, for then look-up is learned soon, and is softened half-way, for a query of a large model is
not meant for one token of 800 either. A checkpoint holds model, optimisers and step, so a killed
run continues exactly where it was: give the same command again. One CPU thread needs about 25
minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvpolicies.errors import UserError
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.tasks import ledger
from kvpolicies.files import make_folder, write_text, writing
from kvpolicies.train.embedded import card as embedded_card
from kvpolicies.train.embedded.data import IGNORED, Stage, training_batch
from kvpolicies.train.embedded.muon import Muon


@dataclass(frozen=True)
class EmbeddedRecipe:
    """Everything that decides the weights, beside the seed."""

    steps: int = 1700
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 50
    decay_from: float = 0.5  # constant before this share of the run, then linear to zero
    clip: float = 1.0
    sharp: float = 2.0  # query and key norms at the start
    soft: float = 0.85  # the most they may be at the end
    soften: tuple[float, float] = (0.25, 0.6)  # the share of the run in which the limit falls
    checkpoint_every: int = 100
    stages: tuple[Stage, ...] = (
        Stage(150, 2, 6, 2048, drills=24),
        Stage(300, 2, 8, 2048),
        Stage(500, 4, 18, 4096),
        Stage(1700, 4, 38, 4096),
    )

    def scaled(self, steps: int) -> EmbeddedRecipe:
        """This curriculum stretched or shrunk to ``steps`` training steps."""
        if steps < 1:
            raise UserError(f"--steps is {steps}; it must be 1 or more")
        stages = tuple(
            replace(stage, until=-(-stage.until * steps // self.steps)) for stage in self.stages
        )
        return replace(self, steps=steps, stages=stages)


SMOKE = EmbeddedRecipe(
    steps=6, warmup=2, checkpoint_every=2, stages=(Stage(3, 2, 3, 256), Stage(6, 4, 6, 256))
)


def model_config() -> Qwen3Config:
    """Qwen3, 4 layers of width 128, 4 query heads on 2 KV heads of 32."""
    return Qwen3Config(
        vocab_size=len(ledger.vocabulary()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def learning_rate_share(recipe: EmbeddedRecipe, step: int) -> float:
    """Linear warm-up, a constant, then linear to zero."""
    warm = (step + 1) / max(1, recipe.warmup)
    left = (recipe.steps - step) / max(1.0, recipe.steps * (1 - recipe.decay_from))
    return min(1.0, warm, left)


def norm_limit(recipe: EmbeddedRecipe, step: int) -> float:
    """The most that the query and key norms' weights may be, root mean square, after a step."""
    begin, end = recipe.soften
    done = min(1.0, max(0.0, (step / recipe.steps - begin) / (end - begin)))
    return recipe.sharp + (recipe.soft - recipe.sharp) * done


@torch.no_grad()
def limit_norms(model: Qwen3ForCausalLM, most: float) -> None:
    """Shrinks the weights of query and key norms to a root mean square of `most`, if larger.

    A logit is at most their product times the square root of the head size.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.mul_((most / weight.square().mean().sqrt()).clamp_max(1.0))


@torch.no_grad()
def initialise(model: Qwen3ForCausalLM, sharp: float = 2.0) -> None:
    """Start where in-context look-up is learned soon; without this most of a run waits for it.

    Query and key norms start at `sharp` rather than 1: a head can single out one token of 800.
    Two heads of the first layer start as "the token before" and "the one before that": all
    embeddings share one constant coordinate, and RoPE turns it into attention at a distance.
    """
    weights = dict(model.named_parameters())
    embedding = weights["model.embed_tokens.weight"]
    embedding.normal_(0.0, 0.1)
    embedding[:, 0] = 0.3
    for name, weight in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(sharp)
    keys = weights["model.layers.0.self_attn.k_proj.weight"][:32]
    frequency = model.model.rotary_emb.inv_freq  # [16]
    size = (2.0 ** -torch.arange(len(frequency))).sqrt()  # mostly the fast ones: a sharp peak
    keys.zero_()
    keys[:16, 0] = size
    for head, distance in enumerate((1, 2)):
        queries = weights["model.layers.0.self_attn.q_proj.weight"][32 * head : 32 * (head + 1)]
        queries.zero_()
        queries[:16, 0] = size * (distance * frequency).cos()
        queries[16:, 0] = -size * (distance * frequency).sin()


class Trainer:
    """Model, optimisers and the step they have reached; saves and resumes exactly."""

    def __init__(self, recipe: EmbeddedRecipe, seed: int, out: Path) -> None:
        self.recipe, self.seed, self.at = recipe, seed, 0
        self.path = out / "checkpoint.pt"
        torch.manual_seed(seed)
        self.model = Qwen3ForCausalLM(model_config()).float().train()
        initialise(self.model, recipe.sharp)
        self.ids = {word: token for token, word in enumerate(ledger.vocabulary())}
        inner = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in inner}
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(inner, recipe.muon_lr),
            torch.optim.AdamW(rest, recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.rates = [recipe.muon_lr, recipe.adam_lr]

    def train_step(self) -> float:
        share = learning_rate_share(self.recipe, self.at)
        for optimiser, rate in zip(self.optimisers, self.rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * share
        tokens, labels = training_batch(self.recipe.stages, self.seed, self.at, self.ids)
        # Padding lies on the right and carries no label: the causal mask is mask enough.
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.at += 1
        limit_norms(self.model, norm_limit(self.recipe, self.at))
        return loss.item()

    def save(self) -> None:
        state = {
            "recipe": repr((self.recipe, self.seed)),
            "step": self.at,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        with writing(self.path) as half:
            torch.save(state, half)

    def resume(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["recipe"] != repr((self.recipe, self.seed)):
            raise UserError(f"{self.path} is of another recipe or seed: choose another --out")
        self.at = state["step"]
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def train(recipe: EmbeddedRecipe, seed: int, out: Path, stop_after: int | None = None) -> Trainer:
    """Train to the recipe's end (or ``stop_after``), resuming from ``out`` if a run lies there."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, seed, out)
    if trainer.path.exists():
        trainer.resume()
    end = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    with tqdm(total=recipe.steps, initial=trainer.at, desc="train", unit="step") as bar:
        while trainer.at < end:
            loss = trainer.train_step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if trainer.at % recipe.checkpoint_every == 0 or trainer.at == end:
                trainer.save()
    return trainer


def evaluate(
    model: Qwen3ForCausalLM, count: int, batch_size: int = 16
) -> list[embedded_card.Solved]:
    """Greedy full-cache decoding of held-out problems, seeds 0 to count - 1, 150 to 800 tokens."""
    problems = [
        ledger.make_problem(seed, length=round(165 + 620 * seed / max(1, count - 1)))
        for seed in range(count)
    ]
    with tqdm(total=count, desc="evaluate", unit="problem") as bar:
        return embedded_card.solve(
            model.eval(), ledger.build_tokenizer(), problems, batch_size, bar.update
        )


def export(trainer: Trainer, out: Path, problems: int) -> None:
    """Write weights, configs, tokenizer and the measured model card to ``out``."""
    model = trainer.model.eval()
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=False)
    model.save_pretrained(out)
    ledger.build_tokenizer().save_pretrained(out)
    solved = evaluate(model, problems)
    write_text(
        out / "README.md", embedded_card.model_card(trainer.seed, trainer.recipe.steps, solved)
    )
    exact = sum(s.grade.exact for s in solved)
    print(f"exact answers: {exact} of {len(solved)}; written to {out}")


def main(argv: Sequence[str] | None = None) -> None:
    about, example = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicies.train.embedded.run",
        description=about,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="weights and checkpoint go here")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and data (0)")
    parser.add_argument("--steps", type=int, help="training steps, stages in proportion")
    parser.add_argument("--smoke", action="store_true", help="a few small steps: does it run?")
    parser.add_argument("--problems", type=int, help="held-out problems to evaluate on (208)")
    parser.add_argument("--threads", type=int, default=1, help="1 gives the same bits each time")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    recipe = SMOKE if args.smoke else EmbeddedRecipe()
    problems = args.problems or (2 if args.smoke else 208)
    try:
        recipe = recipe if args.steps is None else recipe.scaled(args.steps)
        make_folder(args.out, "--out")
        with claims.alone(args.out):
            export(train(recipe, args.seed, args.out), args.out, problems)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
