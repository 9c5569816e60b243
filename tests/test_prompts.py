"""Word the judge's prompt: what stands in it, and what text inside a pair can't do to it."""

from __future__ import annotations

import time

import pytest
from judge_cases import PROMPT, SHOT, check_golden, fixed_case, pair, table

from storage.schema import MESSAGES
from tasks.judge import draw, prompts

NASTY = "use {response_b} or {prompt}, {0} {} {{x}} %s \\1 \\g<0> $1"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_one_user_turn_is_its_content() -> None:
    assert prompts.conversation([turn("user", "Why?\n")]) == "Why?\n"


def test_several_turns_are_labelled() -> None:
    turns = [turn("system", "Be kind."), turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "Why?")]
    assert prompts.conversation(turns) == "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Why?"


def test_a_lone_turn_of_another_role_is_labelled() -> None:
    assert prompts.conversation([turn("tool", "42")]) == "Tool: 42"


def test_no_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="no turns"):
        prompts.conversation([])


def test_text_of_a_pair_is_put_in_literally() -> None:
    asked = prompts.judge_messages(PROMPT, [turn("user", "{response_a}?")], NASTY, "second")
    assert [one["role"] for one in asked] == ["system", "user"]
    assert asked[1]["content"] == f"Question: {{response_a}}?\nA: {NASTY}\nB: second\nEnd with [[A]] or [[B]]."


def test_few_shot_examples_are_turns_that_end_with_their_verdict() -> None:
    config = PROMPT.model_copy(update={"system": None, "few_shot": (SHOT,)})
    asked = prompts.judge_messages(config, "Q", "1", "2")
    assert [one["role"] for one in asked] == ["user", "assistant", "user"]
    assert asked[0]["content"].startswith("Question: 1+1?\nA: 2\nB: 3\n")
    assert asked[1]["content"] == "A adds up.\n\n[[A]]"


def test_render_shows_the_responses_in_order() -> None:
    rows = table("pairs", [pair("p"), pair("q")])
    rendered = prompts.render(rows, ["ba", "ab"], PROMPT)
    assert rendered.schema.field("prompt").type == MESSAGES
    asked = rendered.to_pylist()
    assert [(row["pair_id"], row["order"]) for row in asked] == [("p", "ba"), ("q", "ab")]
    assert "A: second of p\nB: first of p" in asked[0]["prompt"][1]["content"]
    for row, shown in zip(asked, (("second of p", "first of p"), ("first of q", "second of q")), strict=True):
        assert row["prompt"] == prompts.judge_messages(PROMPT, f"question {row['pair_id']}", *shown)


def test_render_refuses_orders_that_don_t_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        prompts.render(table("pairs", [pair("p")]), ["ab", "ba"], PROMPT)


def test_shown_order_is_a_fair_coin_of_seed_and_pair_alone() -> None:
    """Traps, rule 18."""
    ids = [f"p{number}" for number in range(4000)]
    orders = prompts.shown_order(7, ids)
    assert prompts.shown_order(7, ids[::-1]) == orders[::-1]
    assert abs(orders.count("ab") - 2000) < 150
    other = prompts.shown_order(8, ids)
    assert abs(sum(one == two for one, two in zip(orders, other, strict=True)) - 2000) < 150


def test_the_lots_of_purposes_are_independent() -> None:
    ids = [f"p{number}" for number in range(4000)]
    one, two = (draw.hash_bits(0, ids, purpose=name) >> 63 for name in ("order", "keep"))
    assert abs(int((one == two).sum()) - 2000) < 150


def test_the_digest_names_the_wording() -> None:
    assert prompts.prompt_digest(PROMPT) == prompts.prompt_digest(PROMPT.model_copy())
    digests = {
        prompts.prompt_digest(PROMPT.model_copy(update=change))
        for change in ({}, {"system": None}, {"few_shot": (SHOT,)})
    }
    assert len(digests) == 3


def test_golden() -> None:
    pairs, _ = fixed_case()
    config = PROMPT.model_copy(update={"few_shot": (SHOT,)})
    orders = prompts.shown_order(3, pairs.column("pair_id").to_pylist())
    talk = prompts.conversation([turn("user", "a"), turn("assistant", "b"), turn("user", "c")])
    output = [prompts.render(pairs, orders, config).to_pylist(), talk, prompts.prompt_digest(config)]
    check_golden("prompts", prompts.VERSION, output)


def test_speed() -> None:
    """Render 20 000 rows in seconds (100 000 took about one and a half seconds)."""
    rows = table("pairs", [pair(f"p{number}") for number in range(100)]).take(
        [number % 100 for number in range(20_000)]
    )
    start = time.perf_counter()
    prompts.render(rows, ["ab"] * 20_000, PROMPT)
    assert time.perf_counter() - start < 3
