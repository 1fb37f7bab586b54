"""From records to token ids: which columns, as a conversation or as plain text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.study.prompts import check_words
from kvpolicies.eval.tasks import ledger
from kvpolicies.models.form import Form
from kvpolicies.models.prompts import Prompts, user

Record = Mapping[str, Any]
Encode = Callable[[Record], list[int]]

MESSAGES = ("messages", "conversations", "conversation")
PAIRS = (
    ("problem", "solution"),
    ("problem", "generated_solution"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "solution"),
    ("question", "answer"),
    ("instruction", "output"),
)
TEXTS = ("text", "content")
# ShareGPT's names of who speaks.
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def columns_of(record: Record, wanted: Sequence[str], where: str) -> tuple[str, ...]:
    """Which columns of the data are read: those wanted, or the first of known names.

    Nemotron-Math-v2 is known by its `messages`.

    Raises:
        UserError: if a wanted one is missing, or none is known.
    """
    if missing := [name for name in wanted if name not in record]:
        raise UserError(f"{where}: no column {missing[0]!r}; there are {', '.join(record)}")
    if wanted:
        return tuple(wanted)
    known = [(name,) for name in MESSAGES] + list(PAIRS) + [(name,) for name in TEXTS]
    for names in known:
        if all(name in record for name in names):
            return names
    raise UserError(f"{where}: name the columns to read; there are {', '.join(record)}")


def encoder(tokenizer: Any, columns: Sequence[str], form: Form, where: str) -> Encode:
    """Turns a record into token ids, ended as the model ends a text.

    Two columns are a prompt and its answer; a column of messages holds role and content (or from
    and value) and perhaps reasoning_content: both as a deployment asks, and is answered. Anything
    else is text, one column after the other.

    Args:
        form: how prompts are rendered; `chat` takes text for a turn of the user's too.

    Raises:
        UserError: for `chat` without a template; later for a record that has no such text.
    """
    prompts = Prompts(tokenizer, form)

    def encode(record: Record) -> list[int]:
        turns = _turns(record, columns, where)
        if any("role" in turn for turn in turns) or form.template == "chat":
            try:
                return (
                    prompts.document([{"role": "user", **turn} for turn in turns]) if turns else []
                )
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        text = "\n\n".join(turn["content"] for turn in turns if turn["content"])
        return prompts.ended(tokenizer.encode(text)) if text else []

    return encode


def ledger_encoder(tokenizer: Any, form: Form) -> Callable[[ledger.LedgerProblem], list[int]]:
    """Turns a ledger problem, prompt and trace, into ids, a word of either each.

    Raises:
        UserError: for a tokenizer that does not know the words.
    """
    prompts = Prompts(tokenizer, form)

    def encode(problem: ledger.LedgerProblem) -> list[int]:
        check_words(problem, tokenizer)
        return prompts.prompt(user(problem.prompt)) + tokenizer.encode(
            problem.trace, add_special_tokens=False
        )

    return encode


def _turns(record: Record, columns: Sequence[str], where: str) -> list[dict[str, Any]]:
    """The record as turns of role and content; of plain text, content alone."""
    if missing := [name for name in columns if name not in record]:
        raise UserError(f"{where}: a record without {missing[0]!r}")
    if len(columns) == 1 and not _is_text(record[columns[0]]):
        return _messages(record[columns[0]], where)
    texts = ["" if record[name] is None else str(record[name]) for name in columns]
    if len(columns) != 2:
        return [{"content": text} for text in texts]
    # A prompt without its answer, or the reverse, is no document.
    pair = zip(("user", "assistant"), texts, strict=True)
    return [{"role": role, "content": text} for role, text in pair] if all(texts) else []


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str | int | float) and not _is_list(value))


def _is_list(value: Any) -> bool:
    """Some files hold messages as JSON inside of JSON."""
    return isinstance(value, str) and value.lstrip().startswith("[{")


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(value) if isinstance(value, str) else list(value)
        turns = []
        for message in messages:
            role = message.get("role") or message.get("from")
            turn = {k: v for k, v in message.items() if k not in ("from", "value") and v}
            turn["role"] = ROLES.get(role, role)
            turn["content"] = message.get("content") or message.get("value") or ""
            if not isinstance(turn["role"], str) or not isinstance(turn["content"], str):
                raise TypeError
            turns.append(turn)
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{where}: messages must be a list of role and content") from None
    return turns
