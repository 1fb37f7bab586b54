"""Names, specs, other people's policies, config files, and the command line's errors."""

from argparse import Namespace
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvpolicies import registry
from kvpolicies.budget import Budget
from kvpolicies.cli import main
from kvpolicies.config import (
    Deployment,
    dump_yaml,
    from_args,
    from_mapping,
    load_yaml,
    split_list,
)
from kvpolicies.errors import UserError, nearest
from kvpolicies.policy import Policy
from tests.support.specs import SPECS


@dataclass(frozen=True, kw_only=True)
class Theirs(Policy):
    """A policy of somebody else's."""

    name = "theirs"
    strength: float = 1.0


@pytest.mark.parametrize("spec", SPECS)
def test_a_policy_prints_as_the_spec_that_makes_it(spec: str) -> None:
    policy = registry.resolve(spec)
    assert registry.resolve(str(policy)) == policy
    assert isinstance(policy, Policy) and str(policy).startswith(policy.name)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("becon", "beacon"),
        ("beacon(n_beacons=3)", "n_beacon"),
        ("full(x=1)", "no options"),
        ("beacon(3)", "expected a name"),
        ("beacon(n_beacon=", "expected a name"),
        ("beacon(n_beacon=__import__('os'))", "expected a name"),
        ("", "expected a name"),
        ("beacon(pool='median')", "max, mean"),
        ("beacon(n_beacon=-1)", "lie in [0, 65536]"),
        ("beacon(n_beacon=2.5)", "whole number"),
        ("beacon(n_beacon=True)", "whole number"),
        ("beacon(n_beacon=8, n_beacon=9)", "given twice"),
        ("beacon(pool=3)", "text"),
        ("rkv(mix='a')", "finite number"),
        ("rkv(mix=1e999)", "finite number"),
        ("rkv(mix=None)", "finite number"),
        ("lazy(alpha='a')", "finite number"),
        ("tova(faithful=1)", "True or False"),
        ("tova(faithful='yes')", "True or False"),
        ("random(seed=-1)", "at least 0"),
        ("beacon(**{})", "expected a name"),
        ("random(seed=" + "9" * 5000 + ")", "expected a name"),
        ("(" * 500 + ")" * 500, "expected a name"),
        ("snapkv(kernel=4)", "odd"),
        ("rkv(mix=2)", "mix"),
        ("streaming(positions='slots')", "original"),
    ],
)
def test_bad_specs_are_refused_with_a_hint(spec: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        registry.resolve(spec)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_other_peoples_policies_come_in_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", f"{__name__}:Theirs", registry.GROUP),
        EntryPoint("beacon", f"{__name__}:Theirs", registry.GROUP),  # may not shadow ours
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(registry, "load", lambda target: _load(target))
    assert registry.resolve("theirs(strength=2.0)") == Theirs(strength=2.0)
    assert registry.resolve("beacon").name == "beacon"
    assert "theirs" in registry.policy_names()
    assert registry.policy_names().count("beacon") == 1


def _load(target: str):
    import importlib

    module, _, name = target.partition(":")
    return Theirs if name == "Theirs" else getattr(importlib.import_module(module), name)


def test_a_deployment_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    config = Deployment(policy="rkv(mix=0.2)", budget="128", temperature=0.6, sinks=2)
    (tmp_path / "deploy.yaml").write_text(dump_yaml(config))
    assert load_yaml(Deployment, tmp_path / "deploy.yaml") == config


@pytest.mark.parametrize(
    ("mapping", "hint"),
    [
        ({"polcy": "full"}, "did you mean 'policy'"),
        ({"policy": "becon"}, "did you mean 'beacon'"),
        ({"budget": "32", "window": 30}, "no slot to choose"),
        ({"batch_size": "many"}, "whole number"),
        ({"batch_size": 1.5}, "whole number"),
        ({"batch_size": 0}, "at least 1"),
        ({"temperature": "hot"}, "a number"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"policy": ["full"]}, "text"),
        (["full"], "keys and values"),
    ],
)
def test_a_bad_deployment_is_refused_in_one_line(mapping: object, hint: str) -> None:
    with pytest.raises(UserError) as error:
        from_mapping(Deployment, mapping, "deploy.yaml")
    assert hint in str(error.value)
    assert str(error.value).startswith("deploy.yaml") and "\n" not in str(error.value)


def test_bad_files_name_themselves(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: embedded\npolicy: [full\n")
    (tmp_path / "date.yaml").write_text("model: 2026-99-99\n")
    (tmp_path / "big.yaml").write_text(f"seed: {'9' * 5000}\n")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    (tmp_path / "inf.yaml").write_text("seed: .inf\n")
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (tmp_path / "latin.yaml").write_bytes("model: \xe9\n".encode("latin-1"))
    for name, hint in [
        ("bad.yaml", "line"),
        ("none.yaml", "no such file"),
        ("date.yaml", "no valid YAML"),
        ("big.yaml", "no valid YAML"),
        ("deep.yaml", "no valid YAML"),
        ("inf.yaml", "whole number"),
        ("twice.yaml", "'seed' is given twice"),
        ("latin.yaml", "no valid YAML"),
    ]:
        with pytest.raises(UserError, match=hint) as error:
            load_yaml(Deployment, tmp_path / name)
        assert name in str(error.value)


def test_lists_are_split_outside_of_brackets() -> None:
    assert split_list("beacon(a=1,b='x'), random,,full") == ["beacon(a=1,b='x')", "random", "full"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["polices"], "did you mean 'policies'"),
        (["generate", "--polcy", "full"], "--polcy"),
        (["generate", "--policy", "becon", "--prompt", "x"], "did you mean 'beacon'"),
        (["generate", "--budget", "9", "--window", "9", "--prompt", "x"], "no slot"),
        (["generate"], "no prompt"),
        (["generate", "--policy", "", "--prompt", "x"], "policy: empty"),
        (["generate", "missing.yaml", "--prompt", "x"], "missing.yaml"),
        (["generate", "--prompt-file", "missing.txt"], "missing.txt"),
        (["generate", "--model", "./nowhere", "--prompt", "x"], "nowhere"),
        (["replay", "missing.safetensors"], "no such file"),
        (["replay"], "required"),
    ],
)
def test_the_command_line_fails_in_one_line(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_policies_lists_all_with_source_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    for name in registry.POLICIES:
        assert f"\n{name:<10} " in "\n" + out
    assert "2309.17453" in out and "n_beacon=16" in out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    from kvpolicies.cli import COMMANDS

    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert capsys.readouterr().out.count(f"kvpolicies {command}") >= 2, "usage and an example"


def test_no_word_is_suggested_that_is_like_none() -> None:
    assert nearest("lerning_rate", ["aggregate", "seed"]) == "known: aggregate, seed"
    assert nearest("lerning_rate", ["learning_rate"]).startswith("did you mean 'learning_rate'?")


def test_a_share_keeps_its_sinks_and_window() -> None:
    spec = Deployment(budget="25%", sinks=0, window=3).budget_spec
    assert spec.of(400) == Budget(100, 0, 3)


def test_options_win_before_a_file_is_checked() -> None:
    file = {"budget": 32, "window": 30, "policy": "rkv"}
    with pytest.raises(UserError, match=r"^d\.yaml: budget: total 32 leaves no slot"):
        from_args(Deployment, Namespace(), file, "d.yaml")
    config = from_args(Deployment, Namespace(budget="64"), file, "d.yaml")
    assert (config.budget, config.window, config.policy) == ("64", 30, "rkv")
    with pytest.raises(UserError, match=r"^d\.yaml with --budget: budget: total 33 leaves no"):
        from_args(Deployment, Namespace(budget="33"), file, "d.yaml")
    with pytest.raises(UserError, match="unknown key 'budgt': did you mean 'budget'"):
        from_args(Deployment, Namespace(budget="64"), {"budgt": 32}, "d.yaml")


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63, 10**30])
def test_a_whole_number_is_one_however_large(seed: int, tmp_path: Path) -> None:
    assert from_args(Deployment, Namespace(seed=str(seed))).seed == seed
    (tmp_path / "seed.yaml").write_text(f"seed: {seed}\n")
    assert load_yaml(Deployment, tmp_path / "seed.yaml").seed == seed


@pytest.mark.parametrize(("text", "seed"), [("007", 7), ("1_000", 1000), ("-0", 0), ("+4", 4)])
def test_yaml_reads_numbers_as_the_command_line_does(text: str, seed: int, tmp_path: Path) -> None:
    (tmp_path / "seed.yaml").write_text(f"seed: {text}\n")
    assert load_yaml(Deployment, tmp_path / "seed.yaml").seed == seed
    assert from_args(Deployment, Namespace(seed=text)).seed == seed


@pytest.mark.parametrize("text", ["٤", "４0", "1:30", "0x10", "1e1", "4__0", "nan", "²"])
def test_what_is_no_decimal_whole_number_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "seed.yaml").write_text(f"seed: {text}\n", encoding="utf-8")
    for read in (
        lambda: load_yaml(Deployment, tmp_path / "seed.yaml"),
        lambda: from_args(Deployment, Namespace(seed=text)),
    ):
        with pytest.raises(UserError, match="expected a whole number, got"):
            read()
