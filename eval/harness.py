"""Any policy as a model of lm-eval (EleutherAI's lm-evaluation-harness), named `kvpolicies`.

    python -m kvpolicies.eval.harness run --model kvpolicies \\
        --model_args model=Qwen/Qwen3-4B,policy=beacon,budget=1024,dtype=bfloat16 --tasks gsm8k

Everything after `harness` is lm-eval's own command line; in Python, importing this module is what
registers the name. Needs `pip install kvpolicies[lm-eval]`.

Generation goes through `kvpolicies.generate`. So does scoring, by teacher forcing: context and
continuation are fed through the same cache, **and the policy evicts while it scores**, so that a
log-likelihood says what the model still knew at each token. `full` gives the plain model's.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kvpolicies.budget import BudgetSpec
from kvpolicies.decoding import generate
from kvpolicies.errors import UserError
from kvpolicies.generation import Generation
from kvpolicies.models import loading
from kvpolicies.models.form import Form
from kvpolicies.models.prompts import Prompts
from kvpolicies.registry import resolve

try:
    from lm_eval import utils as lm_utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError:
    raise UserError("lm-eval is not installed: pip install kvpolicies[lm-eval]") from None


@register_model("kvpolicies")
class PolicyLM(TemplateLM):
    """A model under one policy and one budget.

    Args:
        model: as everywhere here: embedded, smollm2, a hub id, a folder, or gguf:FILE.
        policy: with options, such as `beacon(n_beacon=8)`; give it as a dict in Python where the
            options have commas, which lm-eval's command line splits at.
        budget: slots of a KV head, or a share (25%) of context + continuation.
        batch_size: rows at once. Results do not depend on it.
        dtype, device: of weights and cache.
        max_gen_toks: most new tokens where a task does not say.
        max_length: most tokens of context and continuation (default: the model's positions);
            longer contexts lose their beginning.
        seed: of sampling, and of the random policy.
        thinking: with lm-eval's --apply_chat_template, as of `Form`; there is no wrapper, for
            lm-eval writes the prompts.

    Raises:
        UserError: an unknown policy, an impossible budget, a model that is not there.
    """

    def __init__(
        self,
        model: str = "embedded",
        policy: str = "full",
        budget: str | int = "100%",
        batch_size: int | str = 8,
        dtype: str = "float32",
        device: str | None = None,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        seed: int = 0,
        thinking: bool | str | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(other) - {"max_batch_size"}):
            raise UserError(f"model kvpolicies: unknown argument {unknown[0]!r}")
        self.policy, self.budget = resolve(policy), BudgetSpec(str(budget)).text
        if self.policy.needs_future:
            raise UserError(f"policy {policy} looks ahead and cannot generate by itself")
        self.batch_size = _whole(batch_size, "batch_size")
        self.max_gen_toks, self.seed = _whole(max_gen_toks, "max_gen_toks"), int(seed)
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # lm-eval asks for cuda:0 where nobody said anything
        self.model, self.tokenizer = loading.load(model, dtype, device)
        self._stops = loading.stop_tokens(self.model, self.tokenizer)
        positions = getattr(self.model.config, "max_position_embeddings", 0) or 1 << 20
        self.max_length = _whole(max_length or positions, "max_length")
        self._device = next(self.model.parameters()).device
        self._thinking, self._chats = _switch(thinking), False

    @property
    def eot_token_id(self) -> int:
        """What ends a text; without one, the first stop token."""
        token = self.tokenizer.eos_token_id
        return self._stops[0] if token is None and self._stops else token or 0

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as a study renders it, by the tokenizer's template.

        Raises:
            UserError: there is none, it has no switch for thinking, or it refuses this.
        """
        self._chats = True
        form = Form("chat", thinking=self._thinking)
        prompts = Prompts(self.tokenizer, form)
        return prompts.text(chat_history, answer=add_generation_prompt, goes_on=True)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; special ones are added unless a template wrote the text, or it has them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (self._chats or (begin and string.startswith(begin)))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding gives it) each."""
        scored = [(0.0, True)] * len(requests)  # of a continuation without tokens
        todo = [i for i, (_, _, wanted) in enumerate(requests) if wanted]
        prompts, wanted = [], []
        for i in todo:
            _, context, continuation = requests[i]
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit max_length "
                    f"{self.max_length}"
                )
            # The last token of all is predicted and never fed: one more than positions fits.
            prompts.append(context[len(continuation) - self.max_length - 1 :])
            wanted.append(continuation)
        sums = [0.0] * len(todo)

        def on_logits(index: int, step: int, logits: torch.Tensor) -> None:
            logs = torch.log_softmax(logits.float(), dim=-1)
            sums[index] += float(logs[wanted[index][step]])

        done = self._run(
            prompts, [len(w) for w in wanted], disable_tqdm, forced=wanted, on_logits=on_logits
        )
        for i, total, made in zip(todo, sums, done, strict=True):
            scored[i] = (total, made.choices == made.tokens)
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], scored[i])
        return scored

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each in windows of `max_length` tokens."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            parts = lm_utils.get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in parts:
                windows.append((None, *lm_utils.make_disjoint_window(part)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (value, _) in zip(owners, scored, strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text up to the first stop string; one that is a single token ends decoding."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(request.args[1])].append(i)
        texts = [""] * len(requests)
        for members in groups.values():
            asked: dict[str, Any] = dict(
                normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
            )
            until = [word for word in asked["until"] if word]
            room = self.max_length - asked["max_gen_toks"]
            if room < 1:
                raise UserError(
                    f"max_gen_toks {asked['max_gen_toks']} leaves no room for a prompt in "
                    f"max_length {self.max_length}"
                )
            prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in members]
            done = self._run(
                [prompt or [self.prefix_token_id] for prompt in prompts],
                [asked["max_gen_toks"]] * len(members),
                disable_tqdm,
                eos_token_id=[*self._stops, *self._single(until)],
                request_ids=members,
                **_sampling(asked),
            )
            for i, made in zip(members, done, strict=True):
                texts[i] = _cut(self.tokenizer.decode(made.tokens, skip_special_tokens=True), until)
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _run(
        self, prompts: list[list[int]], limits: Sequence[int], quiet: bool, **options: Any
    ) -> list[Generation]:
        if not prompts:
            return []
        return generate(
            self.model,
            prompts,
            self.policy,
            self.budget,
            max_new_tokens=limits,
            batch_size=self.batch_size,
            seed=self.seed,
            progress=None if quiet else "requests",
            **options,
        )

    def _single(self, until: list[str]) -> list[int]:
        """Tokens that are a stop string by themselves."""
        encoded = (self.tokenizer.encode(word, add_special_tokens=False) for word in until)
        same = {self.tokenizer.decode(tokens): tokens[0] for tokens in encoded if len(tokens) == 1}
        return [token for text, token in same.items() if text in until]


def _sampling(asked: dict[str, Any]) -> dict[str, Any]:
    """Reads the sampling from lm-eval's generation arguments."""
    if not asked.get("do_sample"):
        return {}
    return {
        "temperature": float(asked.get("temperature") or 1.0),
        "top_p": float(asked.get("top_p") or 1.0),
        "top_k": int(asked.get("top_k") or 0),
    }


def _cut(text: str, until: list[str]) -> str:
    for word in until:
        text = text.split(word)[0]
    return text


def _switch(value: Any) -> bool | None:
    known = {"true": True, "false": False, "none": None}
    if str(value).lower() not in known:
        raise UserError(f"model kvpolicies: thinking must be true or false, got {value!r}")
    return known[str(value).lower()]


def _whole(value: Any, name: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UserError(f"model kvpolicies: {name} must be a whole number >= 1, got {value!r}")
    return number


def main() -> int:
    """lm-eval's command line, with the model `kvpolicies` in it."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"kvpolicies: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
