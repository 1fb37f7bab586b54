"""What a row says of a policy's evictions, against the trace itself, and when it says it."""

from dataclasses import replace

import pytest
import torch

from kvpolicies.eval.study import run, texts
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.models import loading
from kvpolicies.trace import NEVER, EvictionTrace


class Words:
    """A tokenizer: token 7 is ` w7`; token 100 is half of a character, 101 the other half."""

    def decode(self, tokens, skip_special_tokens):
        assert not skip_special_tokens
        text = "".join(f" w{t}" if t < 100 else {100: "\0", 101: "\1"}[t] for t in tokens)
        return text.replace("\0\1", "é").replace("\0", "\ufffd").replace("\1", "\ufffd")


def test_levels_are_the_share_of_heads_that_hold_a_token():
    prompt, new = [1, 2, 3], [4, 5, 6, 7]
    times = torch.full((1, 2, 2, 6), NEVER, dtype=torch.int32)  # the last token has no keys
    times[0, 0, 0, 1] = 3  # seen by queries 1 and 2
    times[0, :, :, 2] = 5  # by 2, 3, 4
    times[0, 1, :, 0] = 4
    trace = EvictionTrace(times, torch.tensor([[*prompt, *new[:-1]]]))
    found = texts.held(trace, 3, new, Words())
    assert found["pieces"] == [f" w{t}" for t in [*prompt, *new]] and found["prompt"] == 3
    assert found["after"] == [1, 2, 3, 4] and found["gap"] == [0, 0]
    # The query that chose new token k stands at position prompt + k - 2.
    assert found["levels"] == ["999", "9799", "57999", "570999"]


@pytest.mark.parametrize(
    ("count", "level"), [(0, 0), (1, 2), (4, 5), (7, 8), (8, 9)]
)  # fmt: skip
def test_only_all_is_all_and_only_none_is_none(count, level):
    assert texts.level(count, 8) == level
    assert {texts.level(1, 1000), texts.level(999, 1000)} == {1, 8}


def test_a_long_text_keeps_its_beginning_and_its_end():
    count = texts.FIRST + texts.LAST + 5
    new = list(range(2, 50)) * (count // 48 + 1)
    new = new[: count - 1]
    times = torch.full((1, 1, 1, count - 1), NEVER, dtype=torch.int32)
    trace = EvictionTrace(times, torch.tensor([[1, *new[:-1]]]))
    found = texts.held(trace, 1, new, Words())
    assert found["gap"] == [texts.FIRST, 5] and len(found["pieces"]) == texts.FIRST + texts.LAST
    assert found["pieces"][texts.FIRST] == f" w{new[texts.FIRST + 4]}"
    assert len(found["levels"][-1]) == len(found["pieces"]) - 1


def test_a_character_of_two_tokens_is_one_piece():
    trace = EvictionTrace(
        torch.full((1, 1, 1, 3), NEVER, dtype=torch.int32), torch.tensor([[1, 100, 101]])
    )
    assert texts.held(trace, 1, [100, 101, 100], Words())["pieces"] == [" w1", "", "é", "\ufffd"]


def test_rows_of_the_first_problems_say_it(small_study, tmp_path):
    """Resumed rows too; the digits are those of a decode of its own with a trace."""
    from kvpolicies import generate
    from kvpolicies.eval.study import prompts

    study, folder = small_study
    rows = read_rows(folder / NAME)
    assert all(texts.KEY in row for row in rows)  # 4 problems, 8 recorded
    model, tokenizer = loading.load("embedded")
    asked = prompts.encode(study, study.load(), tokenizer)
    row = next(r for r in rows if r["policy"] == "random" and r["problem"] == asked[1].problem.id)
    (out,) = generate(
        model, [asked[1].prompt], "random", "40", max_new_tokens=len(row["tokens"]),
        forced=[row["tokens"]], request_ids=[asked[1].identity], seed=study.seed, trace=True,
    )  # fmt: skip
    assert out.trace is not None
    held = texts.held(out.trace, out.prompt_tokens, row["tokens"], tokenizer)
    assert held == row[texts.KEY]
    assert "0" in held["levels"][-1] and row["text"].strip() in "".join(held["pieces"])
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:5]))
    run.run_study(replace(study, out=str(tmp_path)))
    again = {str(r[texts.KEY]) for r in read_rows(tmp_path / NAME)}
    assert again == {str(r[texts.KEY]) for r in rows}


def test_a_study_may_record_fewer_and_stays_the_same_study(small_study):
    study, _ = small_study
    (problem, *_) = study.load()
    one = replace(study, texts=1, samples=3, temperature=0.6)
    assert "texts" not in one.identity()
    wanted = [(i, s) for i in range(2) for s in range(3)
              if texts.wanted(one, run.StudyRequest(3 * i + s, problem, s, [1], 1))]  # fmt: skip
    assert wanted == [(0, 0)]
