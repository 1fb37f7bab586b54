"""Fields of requests that are not understood: which may be ignored, and which are refused by name.

A field that would change the answer and is not supported is an error, not silently dropped. Clients
send many of them with the value that changes nothing; those are accepted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicies.errors import nearest
from kvpolicies.serve.errors import ApiError

# Change nothing in the answer.
IGNORED = {
    "cache_salt", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
# Accepted where they ask for nothing special. null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_p": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
}


def check_others(others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Checks what a body holds beside the `known` fields.

    Raises:
        ApiError: 400 for the first field that is unknown, or asks for what is not supported.
    """
    for key, value in others.items():
        if key in IGNORED or value is None:
            continue
        if key not in NEUTRAL:
            names = [*known, *IGNORED, *NEUTRAL]
            raise ApiError(400, f"unknown field {key[:64]!r}: {nearest(key[:64], names)}", key[:64])
        if not any(_equal(value, neutral) for neutral in NEUTRAL[key]):
            only = " or ".join(repr(v) for v in NEUTRAL[key])
            raise ApiError(400, f"{key}: not supported here but for {only}", key)


def _equal(value: Any, neutral: Any) -> bool:
    """Whether they are the same in JSON, where 0 and 0.0 are, but 0 and false are not."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
