"""The generator's labels, judged by rules written a second time, from the text of the rows alone."""

import re
from collections import Counter, defaultdict

import pytest

from configs.run import Category
from tasks.data.synthetic import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, SCHEMA, generate

CATEGORIES = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)


def test_a_configuration_may_name_every_category_and_no_other() -> None:
    assert sorted(Category) == sorted(CATEGORIES)


ROWS = 600 * len(CATEGORIES)
ANIMALS = re.compile(r"\b(dog|cat|horse|sheep|tiger|rabbit|mouse|goat|lion|wolf)\b")
FRUITS = re.compile(r"\b(apple|pear|mango|grape|peach|lemon|plum|cherry|banana|melon)\b")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return generate(CATEGORIES, ROWS, seed=7).to_pylist()


def obeys(subset: str, prompt: str, response: str) -> bool:
    """Say whether a response does what the prompt asks."""
    asked = prompt.rstrip(".").split()[-1]
    words = re.findall(r"[a-z]+", response)
    match subset:
        case "capitals":
            return response == response.upper()
        case "question":
            return response.endswith("?")
        case "exclamation":
            return response.endswith("!")
        case "contains":
            return asked in words
        case "avoids":
            return asked not in words
        case "starts":
            return words[0] == asked
        case "number":
            return any(character.isdigit() for character in response)
        case "animal":
            return bool(ANIMALS.search(response))
        case "fruit":
            return bool(FRUITS.search(response))
        case "quotes":
            return response.startswith('"') and response.endswith('"')
    raise AssertionError(subset)


def test_exactly_the_labelled_response_obeys_the_rule(rows: list[dict[str, str]]) -> None:
    for row in rows:
        right = row["response_a"] if row["label"] == "A" else row["response_b"]
        wrong = row["response_b"] if row["label"] == "A" else row["response_a"]
        assert obeys(row["subset"], row["prompt"], right), row
        assert not obeys(row["subset"], row["prompt"], wrong), row


def test_rationales_end_with_the_verdict_of_their_order(rows: list[dict[str, str]]) -> None:
    other = {"A": "B", "B": "A"}
    for row in rows:
        assert row["rationale"].endswith(f" [[{row['label']}]]")
        assert row["rationale_swapped"].endswith(f" [[{other[row['label']]}]]")
        argument, swapped = (row[name][: -len(" [[A]]")] for name in ("rationale", "rationale_swapped"))
        first, second = re.fullmatch(r"A (.+)\. B (.+)\.", argument).groups()  # type: ignore[union-attr]
        assert swapped == f"A {second}. B {first}."
        assert {first.split(": ")[1], second.split(": ")[1]} == {"yes", "no"}
        assert (first if row["label"] == "A" else second).endswith(": yes")


def test_neither_label_nor_length_tells_the_answer(rows: list[dict[str, str]]) -> None:
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    longer_wins: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        labels[row["subset"]][row["label"]] += 1
        difference = (len(row["response_a"]) - len(row["response_b"])) * (1 if row["label"] == "A" else -1)
        longer_wins[row["subset"]].append(0.5 if difference == 0 else float(difference > 0))
    assert set(labels) == set(CATEGORIES)
    for subset in CATEGORIES:
        assert labels[subset]["A"] == labels[subset]["B"] == 300
        assert 0.4 < sum(longer_wins[subset]) / 600 < 0.6, subset


def test_prompts_are_distinct_across_calls(rows: list[dict[str, str]]) -> None:
    assert len({row["prompt"] for row in rows}) == ROWS
    cycle = 875 * len(IN_DISTRIBUTION)
    prompts = [prompt for start in (0, cycle // 2) for prompt in _prompts(cycle // 2, start)]
    assert len(set(prompts)) == len(prompts)


def test_rows_depend_on_seed_and_position_alone(rows: list[dict[str, str]]) -> None:
    assert generate(CATEGORIES, 50, seed=7, start=25).to_pylist() == rows[25:75]
    assert generate(CATEGORIES, 50, seed=8).to_pylist() != rows[:50]
    assert generate(CATEGORIES, 0, seed=7).schema == SCHEMA


@pytest.mark.parametrize(
    ("categories", "count", "start", "message"),
    [
        ((), 1, 0, "got none"),
        (("capitals", "capitals"), 1, 0, "distinct"),
        (("sonnets",), 1, 0, "got sonnets"),
        (("capitals",), -1, 0, "negative"),
        (("capitals",), 1, -1, "negative"),
    ],
)
def test_bad_requests_are_refused(categories: tuple[str, ...], count: int, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(categories, count, seed=1, start=start)


def _prompts(count: int, start: int) -> list[str]:
    return generate(IN_DISTRIBUTION, count, seed=7, start=start).column("prompt").to_pylist()
