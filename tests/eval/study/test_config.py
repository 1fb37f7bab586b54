"""Studies: defaults, YAML, what is refused before anything is loaded."""

from dataclasses import replace

import pytest

from kvpolicies.budget import Budget
from kvpolicies.config import Deployment, dump_yaml
from kvpolicies.errors import UserError
from kvpolicies.eval.study.config import STUDIES, Study, load_study
from kvpolicies.registry import ON_REQUEST, POLICIES, policy_names, resolve


def test_defaults_are_filled_in():
    study = Study().resolved()
    assert study.budgets == ("69", "101", "133")
    assert study.problems == 48
    asis = [name for name in policy_names() if resolve(name).made_for in (None, "embedded")]
    every = tuple(str(resolve(name)) for name in asis if name != "full")
    assert study.policies == tuple(name for name in every if name not in ON_REQUEST)
    assert Study(policies=("all",)).resolved().policies == every
    assert Study(policies=("beacon(n_beacon=8)", "all")).resolved().policies[1:] == every
    assert set(POLICIES) - set(asis) <= {
        "kvpop",
        "kvpop_mlp",
        "dms",
        "trimkv",
        "kvzap",
        "fastkvzip",
        "triattention",
    }
    assert not any(policy.startswith("full") for policy in study.policies)
    assert study.resolved() == study


def test_the_default_file_is_the_default_study():
    assert load_study("default").resolved() == Study().resolved()


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_resolve(path):
    study = load_study(path.stem)
    data = "problems.jsonl" if study.entry.needs_data else ""
    resolved = replace(study, data=data).resolved()
    assert resolved.policies
    if study.policies:
        assert len(resolved.policies) == len(study.policies), "two spellings of one policy"
    assert study.out == f"results/{'study' if path.stem == 'default' else path.stem}"


def test_yaml_round_trip(tmp_path):
    study = Study(policies=("beacon(n_beacon=8, n_recent=8)", "random"), budgets=("25%",))
    (tmp_path / "study.yaml").write_text(dump_yaml(study))
    assert load_study(str(tmp_path / "study.yaml")) == study


def test_a_deployment_file_is_a_study_of_one_policy(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("model: embedded\npolicy: beacon\nbudget: 181\nbatch_size: 4\n")
    study = load_study(str(path))
    assert (study.policies, study.budgets, study.batch_size) == (("beacon",), ("181",), 4)
    path.write_text(
        "policy: rkv(mix=0.2)\nbudget: 25%\nwindow: 8\nsinks: 0\ntop_k: 5\nstep: eager\n"
    )
    study = load_study(str(path))
    assert (study.policies, study.budgets, study.top_k) == (("rkv(mix=0.2)",), ("25%",), 5)
    assert study.max_new_tokens == Deployment.max_new_tokens and study.batch_size == 8
    assert study.budget_spec("25%").of(400) == Budget(100, 0, 8)
    for text, says in (
        ("stepp: eager", "unknown key 'stepp': did you mean 'step'"),
        ("problems: 4", "unknown key 'problems'"),
        ("step: fast", "step must be one of"),
    ):
        path.write_text(f"policy: beacon\n{text}\n")
        with pytest.raises(UserError, match=says):
            load_study(str(path))


def test_one_budget_is_one_cell_however_it_is_written(tmp_path):
    (tmp_path / "s.yaml").write_text("budgets: [40, 040, 4_0, '040', 25%, 25.0 %]\n")
    assert load_study(str(tmp_path / "s.yaml")).resolved().budgets == ("40", "25%")
    with pytest.raises(UserError, match="expected a number of slots"):
        Study(budgets=("٤٠",)).resolved()


def test_policies_get_their_canonical_spelling():
    study = Study(policies=("beacon( n_recent=8,n_beacon=8 )", "full", "random", "random"))
    assert study.resolved().policies == ("beacon(n_beacon=8, n_recent=8)", "random")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle: embedded", "unknown key 'modle': did you mean 'model'"),
        ("problems: many", "problems: expected a whole number"),
        ("problems: 0", "problems must be at least 1"),
        ("task: legder", "did you mean 'ledger'"),
        ("samples: 4", "set a temperature"),
        ("top_p: 2", "top_p"),
        ("dtype: float8", "dtype"),
        ("[1, 2", "no valid YAML"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path, text, says):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        load_study(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policies": ("beacn",)}, "did you mean 'beacon'"),
        ({"budgets": ("3",)}, "leaves no slot"),
        ({"budgets": ("40",), "window": 36}, "leaves no slot"),
        ({"sinks": -1}, "sinks must be a whole number >= 0"),
        ({"budgets": ("many",)}, "expected a number of slots"),
        ({"task": "gsm8k", "data": "file.jsonl"}, "knows the ledger's words only"),
        ({"data": "file.jsonl"}, "makes its own problems"),
    ],
)
def test_resolving_refuses(changes, says):
    with pytest.raises(UserError, match=says):
        replace(Study(), **changes).resolved()


def test_unknown_study_names_the_known():
    with pytest.raises(UserError, match="did you mean 'fidelity'"):
        load_study("fidelty")


def test_a_temperature_too_low_for_float32_is_refused_when_the_study_is_made():
    with pytest.raises(UserError, match=r"at least 0\.001"):
        Study(temperature=0.0005, samples=2)


@pytest.mark.parametrize(
    "options", [{"problems": 10**12}, {"samples": 10**12, "temperature": 1.0},
                {"max_new_tokens": 10**12}, {"problems": 10**9}],
)  # fmt: skip
def test_what_no_machine_holds_is_refused_at_once(options: dict) -> None:
    with pytest.raises(UserError, match=r"memory|bytes|GiB|GB") as error:
        study = Study(**options)
        study.load()
    assert "lower " in str(error.value) and "\n" not in str(error.value)
