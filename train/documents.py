"""From records to token ids: which columns, as turns of a chat or as plain text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval import ledger

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


def encoder(tokenizer: Any, columns: Sequence[str], template: str, where: str) -> Encode:
    """Turns a record into token ids, ended as the model ends a text.

    Two columns are a prompt and its answer; a column of messages holds role and content (or from
    and value), and perhaps reasoning_content; anything else is text, one column after the other.

    Args:
        template: `chat` asks for the tokenizer's chat template, `plain` for none; `auto` takes it
            where there is one and the data have turns.

    Raises:
        UserError: for `chat` without a template; later for a record that has no such text.
    """
    if template == "chat" and not tokenizer.chat_template:
        raise UserError("template chat: the model's tokenizer has no chat template")
    chats = template != "plain" and bool(tokenizer.chat_template)

    def encode(record: Record) -> list[int]:
        turns = _turns(record, columns, where)
        if chats and (len(turns) > 1 or template == "chat"):
            return tokenizer.encode(_templated(tokenizer, turns, where), add_special_tokens=False)
        text = "\n\n".join(turn["content"] for turn in turns if turn["content"])
        ids = tokenizer.encode(text) if text else []
        end = tokenizer.eos_token_id
        return ids if not ids or end is None or ids[-1] == end else [*ids, end]

    return encode


def ledger_encoder(tokenizer: Any) -> Callable[[ledger.LedgerProblem], list[int]]:
    """Turns a ledger problem, prompt and trace, into ids, a word each.

    Raises:
        UserError: for a tokenizer that does not know the words.
    """

    def encode(problem: ledger.LedgerProblem) -> list[int]:
        text = f"{problem.prompt} {problem.trace}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != problem.length or tokenizer.unk_token_id in ids:
            raise UserError(
                "data ledger needs a model trained on ledger traces, such as embedded; this "
                "model's tokenizer splits the ledger's words"
            )
        return ids

    return encode


def _turns(record: Record, columns: Sequence[str], where: str) -> list[dict[str, Any]]:
    """The record as turns of role and content."""
    if missing := [name for name in columns if name not in record]:
        raise UserError(f"{where}: a record without {missing[0]!r}")
    if len(columns) == 1 and not _is_text(record[columns[0]]):
        return _messages(record[columns[0]], where)
    texts = ["" if record[name] is None else str(record[name]) for name in columns]
    if len(columns) != 2:
        return [{"role": "user", "content": text} for text in texts]
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


def _templated(tokenizer: Any, turns: list[dict[str, Any]], where: str) -> str:
    """The chat as text; reasoning is written out where the template would leave it out."""
    if "reasoning_content" not in str(tokenizer.chat_template):
        turns = [_spelt_out(turn) for turn in turns]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # templates are programs, and raise what they like
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{where}: the model's chat template refuses a record: {first}") from error


def _spelt_out(turn: dict[str, Any]) -> dict[str, Any]:
    reasoning = turn.get("reasoning_content")
    rest = {key: value for key, value in turn.items() if key != "reasoning_content"}
    if reasoning:
        rest["content"] = f"<think>\n{reasoning}\n</think>\n\n{turn['content']}"
    return rest
