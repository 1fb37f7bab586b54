import pytest

from kvpolicies.budget import Budget, BudgetSpec
from kvpolicies.errors import UserError


def test_topk_is_what_is_left() -> None:
    assert Budget(100, 4, 32).topk == 64


@pytest.mark.parametrize(
    ("total", "sinks", "window"), [(36, 4, 32), (0, 0, 0), (10, 4, 32), (-5, 0, 0), (8, -1, 2)]
)
def test_impossible_budgets_name_their_numbers(total: int, sinks: int, window: int) -> None:
    with pytest.raises(ValueError) as error:
        Budget(total, sinks, window)
    culprit = next((n for n in (total, sinks, window) if n < 0), total)
    assert str(culprit) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("total", [1.5, "64", True, None])
def test_numbers_must_be_whole(total: object) -> None:
    with pytest.raises(UserError, match="whole number"):
        Budget(total)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "length", "total"),
    [
        ("1024", None, 1024),
        ("25%", 400, 100),
        ("12.5%", 801, 101),
        ("100%", 77, 77),
        (133, None, 133),
        ("7%", 100, 7),  # .07 * 100 is more than 7 in floats
        ("0.5 %", 2000, 10),
    ],
)
def test_parse(text: str, length: int | None, total: int) -> None:
    assert Budget.parse(text, length=length).total == total


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "1e3",
        "25 percent",
        "%",
        "-25%",
        "0%",
        "101%",
        "25%x",
        "٤٠",
        "４0",
        "4__0",
        "_4",
        "1e1%",
        "nan%",
        ".%",
        "9" * 5000,
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UserError, match="budget"):
        Budget.parse(text, length=100)


def test_a_ratio_needs_a_length() -> None:
    with pytest.raises(UserError, match="length"):
        Budget.parse("25%")


def test_small_budgets_get_a_small_window() -> None:
    assert Budget.parse("1024").window == 32
    assert Budget.parse("40").window == 10
    assert Budget.parse("40", window=3).window == 3


def test_one_budget_has_one_text() -> None:
    assert {BudgetSpec(text).text for text in ("40", "040", "4_0", " 40 ")} == {"40"}
    assert {BudgetSpec(t).text for t in ("25%", "25.0%", "025.%", "25 %")} == {"25%"}
    assert BudgetSpec("12.50%").text == "12.5%" and BudgetSpec("40") == BudgetSpec("4_0")


def test_sinks_and_window_are_those_of_any_length() -> None:
    spec = BudgetSpec("10%", sinks=0, window=2)
    assert [spec.of(n) for n in (30, 300)] == [Budget(3, 0, 2), Budget(30, 0, 2)]
    with pytest.raises(UserError, match="leaves no slot"):
        spec.of(20)
    with pytest.raises(UserError, match="leaves no slot"):
        BudgetSpec("8", sinks=4, window=4)
