"""Scorers on disk and on the hub: round trip, what is refused, and which model they fit."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpolicies
from kvpolicies.errors import UserError
from kvpolicies.learned import scorer as module
from kvpolicies.learned.base import bind, check_base, config_for, fingerprint
from kvpolicies.learned.config import KINDS
from kvpolicies.learned.scorer import Scorer
from kvpolicies.models.memory import meta_model
from kvpolicies.registry import resolve
from tests.kvpolicies.test_families import model_of
from tests.support.models import prompts, tiny
from tests.support.scorers import WINDOW, random_scorer, small

ROOT = Path(__file__).resolve().parents[2]


def refused(call: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    scorer = random_scorer(config_for(tiny(), kind, window=5, hidden=24))
    scorer.save_pretrained(tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "scorer.safetensors",
    ]
    again = Scorer.from_pretrained(tmp_path / "new" / "folder")
    assert again.config == scorer.config
    for name, tensor in scorer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    keys, values = torch.randn(2, 1, 2, 20, 16)
    inputs = torch.randn(1, 20, 64)
    given = (1, keys, values, inputs)
    assert torch.equal(again.scores(*given), scorer.scores(*given))


def test_the_hub_is_asked_for_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_scorer(small("kvpop_mlp")).save_pretrained(tmp_path)
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert Scorer.from_pretrained("owner/scorer").config.kind == "kvpop_mlp"
    assert asked == [
        ("owner/scorer", {"allow_patterns": ["config.json", "scorer.safetensors"]}),
    ]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("nowhere", "./nowhere", "a/b/c", str(tmp_path / "none"), str(Path(__file__))):
        refused(lambda name=name: Scorer.from_pretrained(name), "no such folder")
    refused(lambda: Scorer.from_pretrained("owner/none"), "hub: no network in tests")
    refused(lambda: Scorer.from_pretrained(tmp_path), r"config\.json: no such file")


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    random_scorer(small("kvpop_mlp")).save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "scorer.safetensors"
    good, tensors = config.read_text(), load_file(weights)

    def with_config(change: dict[str, Any], says: str) -> None:
        config.write_text(json.dumps({**json.loads(good), **change}))
        refused(lambda: Scorer.from_pretrained(tmp_path), says)
        config.write_text(good)

    def with_weights(change: dict[str, Any], says: str) -> None:
        save_file({**tensors, **change}, weights)
        refused(lambda: Scorer.from_pretrained(tmp_path), says)
        save_file(tensors, weights)

    with_config({"kind": "kvpop_mpl"}, r"config\.json: scorer: kind .* did you mean 'kvpop_mlp'")
    with_config({"hiden": 3}, "did you mean 'hidden'")
    with_config({"heads": "two"}, "heads: expected a whole number")
    with_config({"base": {"name": "x"}}, "base must name architecture")
    with_config({"base": 3}, "base must be keys and values")
    with_config({"hidden": 17}, r"tensor nets\.0\.first is \[2, 16, 16\], .* says \[2, 16, 17\]")
    with_config({"layers": [0, 1, 2]}, r"lacks tensor ages\.2")
    with_config({"layers": [0]}, r"unknown tensor ages\.1")
    name = next(iter(tensors))
    with_weights({name: tensors[name] * float("nan")}, f"{name} is not finite")
    for text in ("{", "[1]", "null", '{"model_type": "qwen3"}'):
        config.write_text(text)
        refused(lambda: Scorer.from_pretrained(tmp_path), r"config\.json: (malf|exp|kind, lay)")
    config.write_text(good)
    weights.write_bytes(b"not safetensors")
    refused(lambda: Scorer.from_pretrained(tmp_path), r"scorer\.safetensors: cannot be read")
    weights.unlink()
    refused(lambda: Scorer.from_pretrained(tmp_path), r"scorer\.safetensors: cannot be read")
    (tmp_path / "file").write_text("")
    refused(lambda: Scorer(small("dms")).save_pretrained(tmp_path / "file"), "file")


def test_a_fingerprint_is_the_models_and_nothing_elses() -> None:
    base = fingerprint(tiny())
    assert base == {
        "architecture": "Qwen3ForCausalLM",
        "layers": 2,
        "heads": 2,
        "head_dim": 16,
        "config_hash": base["config_hash"],
        "weights": base["weights"],
    }
    config = tiny().config
    before = config.to_dict()
    try:
        config._name_or_path, config.use_cache, config.dtype = "elsewhere", False, torch.bfloat16
        config.transformers_version = "9.9"
        assert fingerprint(tiny()) == base
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 12345.0}
        assert fingerprint(tiny())["config_hash"] != base["config_hash"]
    finally:
        config.update({k: before[k] for k in ("rope_parameters", "use_cache", "dtype")})
    assert fingerprint(tiny()) == base
    others = [tiny("llama"), tiny(layers=3), tiny(kv_heads=4)]
    assert len({fingerprint(m)["config_hash"] for m in (tiny(), *others)}) == 4


def test_another_base_is_refused_with_both_names(tmp_path: Path) -> None:
    random_scorer(config_for(tiny(), "kvpop_mlp")).save_pretrained(tmp_path)
    spec = f"kvpop_mlp(scorer='{tmp_path}')"
    kvpolicies.FixedBudgetCache(tiny(), spec, 64)
    for other in (tiny("llama"), tiny(layers=3)):
        refused(
            lambda other=other: kvpolicies.FixedBudgetCache(other, spec, 64),
            rf"Qwen3ForCausalLM of 2 layers .* the model is {type(other).__name__} of",
        )
        refused(
            lambda other=other: kvpolicies.generate(other, [[5]], spec, 64, max_new_tokens=2),
            "made for",
        )
    refused(lambda: check_base(small("kvpop"), tiny()), "made for no model")
    hybrid = model_of("gemma2, soft-capped")
    layers = config_for(hybrid, "kvpop").layers
    assert 0 < len(layers) < hybrid.config.num_hidden_layers
    check_base(config_for(hybrid, "kvpop"), hybrid)


def test_another_model_of_the_same_config_is_refused(tmp_path: Path) -> None:
    random_scorer(config_for(tiny(), "kvpop_mlp")).save_pretrained(tmp_path)
    spec = f"kvpop_mlp(scorer='{tmp_path}')"
    torch.manual_seed(1)
    other = type(tiny())(tiny().config)
    says = "with other weights: 1[0-9] of 24 tensors differ, model.embed_tokens.weight for one"
    refused(lambda: kvpolicies.FixedBudgetCache(other, spec, 64), says)
    tuned = copy.deepcopy(tiny())
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight += 0.003
    says = r"1 of 24 tensors differ, model\.layers\.1\.mlp\.up_proj\.weight for one"
    refused(lambda: kvpolicies.generate(tuned, [[5]], spec, 64, max_new_tokens=2), says)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.copy_(tiny().model.layers[1].mlp.up_proj.weight)
        tuned.lm_head.weight += 1  # decides no key, value or input
    kvpolicies.FixedBudgetCache(tuned, spec, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_models_dtype_makes_it_no_other_model(dtype: torch.dtype) -> None:
    low = copy.deepcopy(tiny()).to(dtype)
    check_base(config_for(tiny(), "dms"), low)
    check_base(config_for(low, "dms"), tiny())
    check_base(config_for(copy.deepcopy(tiny()).half(), "dms"), copy.deepcopy(tiny()).bfloat16())


def test_a_model_without_storage_has_no_weights_to_compare() -> None:
    bare = meta_model(tiny().config, torch.float32)
    check_base(config_for(tiny(), "dms"), bare)
    assert fingerprint(bare) == {**fingerprint(tiny()), "weights": ""}


def test_scorers_of_older_versions_say_what_to_do(tmp_path: Path) -> None:
    random_scorer(config_for(tiny(), "kvpop_mlp")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    bound = file.read_text()
    values = json.loads(bound)
    for wrong in ("!", values["base"]["weights"][:-4], "", 3, None):
        file.write_text(json.dumps({**values, "base": {**values["base"], "weights": wrong}}))
        spec = f"kvpop_mlp(scorer='{tmp_path}')"
        refused(lambda spec=spec: kvpolicies.FixedBudgetCache(tiny(), spec, 64), "holds no sample")
    del values["base"]["weights"]
    file.write_text(json.dumps(values))
    refused(
        lambda: kvpolicies.FixedBudgetCache(tiny(), f"kvpop_mlp(scorer='{tmp_path}')", 64),
        "does not say which weights .* give its training command again",
    )
    refused(lambda: bind(tmp_path, tiny("llama")), "was made for Qwen3ForCausalLM")
    bind(tmp_path, tiny())
    assert file.read_text() == bound


def test_sizes_that_a_config_claims_are_not_allocated(tmp_path: Path) -> None:
    random_scorer(small("kvpop_mlp")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    for claims, says in (
        ({"hidden": 1 << 20, "heads": 1 << 20}, r"config.json says \[1048576, 16, 1048576\]"),
        ({"hidden": 1 << 20, "heads": 1 << 20, "head_dim": 1 << 20}, "no memory is as large"),
    ):
        file.write_text(json.dumps({**values, **claims}))
        refused(lambda: Scorer.from_pretrained(tmp_path), says)


def test_a_hybrid_models_full_layers_are_scored(tmp_path: Path) -> None:
    model = model_of("gemma2, soft-capped")
    for kind in ("kvpop", "trimkv"):
        random_scorer(config_for(model, kind, window=WINDOW)).save_pretrained(tmp_path / kind)
        (out,) = kvpolicies.generate(
            model,
            prompts(40),
            f"{kind}(scorer='{tmp_path / kind}')",
            kvpolicies.Budget(24, 2, WINDOW),
            max_new_tokens=10,
            eos_token_id=-1,
        )
        assert out.max_slots == 24


def test_names_without_a_scorer_and_scorers_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        assert str(resolve(kind)) == kind
        # Those that come with the package are the embedded model's.
        says = "was made for Qwen3ForCausalLM of 4 layers"
        refused(lambda kind=kind: kvpolicies.FixedBudgetCache(tiny(), kind, 64), says)
    with monkeypatch.context() as patch:
        patch.setattr("kvpolicies.learned.policy.ASSETS", tmp_path)
        for kind in KINDS:
            says = rf"no scorer given: {kind}\(scorer='FOLDER'\)"
            refused(lambda kind=kind: kvpolicies.FixedBudgetCache(tiny(), kind, 64), says)
    random_scorer(config_for(tiny(), "kvpop_mlp")).save_pretrained(tmp_path)
    refused(
        lambda: kvpolicies.FixedBudgetCache(tiny(), f"kvpop(scorer='{tmp_path}')", 64),
        r"is one of kvpop_mlp: kvpop_mlp\(",
    )


def test_a_scorer_that_is_trained_on_is_read_anew(tmp_path: Path) -> None:
    policies = []
    for seed in (0, 1):
        random_scorer(small("kvpop_mlp"), seed).save_pretrained(tmp_path)
        policies.append(resolve(f"kvpop_mlp(scorer='{tmp_path}')"))
        policies[-1].network(torch.device("cpu"))
    again = resolve(str(policies[1]))
    old, new, same = (p.network(torch.device("cpu")) for p in (*policies, again))
    assert same is new and policies[0] == policies[1]
    assert not torch.equal(old.nets["0"].first, new.nets["0"].first)


def test_without_xlstm_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module._backends.cache_clear()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    refused(lambda: Scorer(small("kvpop")), r"pip install kvpolicies\[learned\]")
    Scorer(small("kvpop_mlp"))


def test_no_scorer_imports_more_of_xlstm_than_its_cells() -> None:
    """`import xlstm` looks for CUDA's toolkit, and mlstm_kernels has another licence."""
    code = (
        "import sys\n"
        "from kvpolicies.learned.config import KINDS, ScorerConfig\n"
        "from kvpolicies.learned.scorer import Scorer\n"
        "for kind in KINDS:\n"
        "    sizes = dict(layers=(0,), heads=1, head_dim=2, input_size=2, groups=1)\n"
        "    Scorer(ScorerConfig(kind=kind, **sizes))\n"
        "print(*[m for m in sys.modules if m.startswith(('xlstm', 'mlstm'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
