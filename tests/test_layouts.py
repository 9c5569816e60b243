"""Public data sets' columns, as their cards and loaders have them, become pairs; what they can't tell is a reason."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_formats import check, jsonl, judge, user, winner

from configs.run import ColumnsConfig, Source
from storage.errors import DataError
from tasks.data.formats import COLUMNS, FileKind, Form, Layout, Reading, Reason, make_form, read_pairs
from tasks.data.pairing import prompt_key
from tasks.judge.prompts import conversation

if TYPE_CHECKING:
    from pathlib import Path


def read(*rows: dict[str, Any], form: Form | None = None) -> Reading:
    return check(read_pairs(pa.Table.from_pylist(list(rows)), name="x", form=form))


def only(reading: Reading) -> dict[str, Any]:
    (pair,) = reading.pairs.to_pylist()
    return dict(pair)


def shown(reading: Reading) -> str:
    return reading.layout.removesuffix(" (table)")


GPT, HUMAN = "gpt", "human"


def said(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ultrafeedback_binarized": (
        {
            "prompt": "q",
            "prompt_id": "1",
            "chosen": [user("q"), judge("good")],
            "rejected": [user("q"), judge("bad")],
            "messages": [user("q"), judge("good")],
            "score_chosen": 8.0,
            "score_rejected": 7.5,
        },
        "chosen: prompt, chosen, rejected",
    ),
    "reward-bench": (
        {
            "prompt": "q",
            "chosen": "good",
            "chosen_model": "m",
            "rejected": "bad",
            "rejected_model": "n",
            "subset": "s",
            "id": 1,
        },
        "chosen: prompt, chosen, rejected",
    ),
    "hh-rlhf": (
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        "transcript: chosen, rejected",
    ),
    "sharegpt": (
        {"conversations": [said(HUMAN, "q")], "chosen": said(GPT, "good"), "rejected": said(GPT, "bad")},
        "sharegpt: conversations, chosen, rejected",
    ),
    "ultrainteract_pair": (
        {
            "task": "Coding",
            "dataset": "codecontest",
            "trajectory": [said("user", "q")],
            "chosen": "good",
            "rejected": "bad",
            "id": "d1_5_3",
            "parent_id": "tree",
        },
        "trajectory: trajectory, chosen, rejected",
    ),
    "alpaca_eval": (
        {"instruction": "q", "output_1": "bad", "output_2": "good", "preference": 2.0, "annotator": "gpt4"},
        "labelled: instruction, output_1, output_2, preference",
    ),
    "alpaca_farm": (
        {"instruction": "q", "input": "", "output_1": "good", "output_2": "bad", "preference": 1},
        "labelled: instruction, input, output_1, output_2, preference",
    ),
    "llmbar": (
        {"input": "q", "output_1": "good", "output_2": "bad", "label": 1},
        "labelled: input, output_1, output_2, label",
    ),
    "pku-saferlhf": (
        {"prompt": "q", "response_0": "bad", "response_1": "good", "better_response_id": 1, "safer_response_id": 0},
        "labelled: prompt, response_0, response_1, better_response_id",
    ),
    "answers": (
        {"question": "q", "answer_a": "bad", "answer_b": "good", "winner": "model_b"},
        "labelled: question, answer_a, answer_b, winner",
    ),
    "chatbot_arena_conversations": (
        {
            "model_a": "m",
            "model_b": "n",
            "winner": "model_a",
            "conversation_a": [user("q"), judge("good")],
            "conversation_b": [user("q"), judge("bad")],
        },
        "labelled: conversation_a, conversation_b, winner",
    ),
    "arena-human-preference-55k": (
        {
            "id": 1,
            "prompt": '["q"]',
            "response_a": '["bad"]',
            "response_b": '["good"]',
            "winner_model_a": 0,
            "winner_model_b": 1,
            "winner_tie": 0,
        },
        "one-hot: prompt, response_a, response_b, winner_model_a, winner_model_b, winner_tie",
    ),
    "pandalm": (
        {
            "idx": 0,
            "instruction": "q",
            "input": "",
            "response1": "bad",
            "response2": "good",
            "annotator1": 2,
            "annotator2": 1,
            "annotator3": 2,
        },
        "annotators: instruction, input, response1, response2, annotator1, annotator2, annotator3",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_detected_and_shown(name: str, tmp_path: Path) -> None:
    row, layout = LAYOUTS[name]
    reading = read(row)
    assert shown(reading) == layout
    pair = only(reading)
    assert (pair["prompt"], winner(pair)) == ([user("q")], "good")
    assert {pair["response_a"], pair["response_b"]} == {"good", "bad"}
    file = jsonl(tmp_path / "x.jsonl", row)
    assert read_pairs(file, name="x").pairs == reading.pairs
    (tmp_path / "x.json").write_text(json.dumps([row], indent=2))
    assert read_pairs(tmp_path / "x.json", name="x").pairs == reading.pairs
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert read_pairs(tmp_path / "x.parquet", name="x").pairs == reading.pairs


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_that_was_found_can_be_named(name: str) -> None:
    row, layout = LAYOUTS[name]
    named = Form(layout=Layout(layout.partition(":")[0]))
    assert read(row, form=named).pairs == read(row).pairs


def test_the_config_names_what_can_be_read() -> None:
    def words(name: str) -> set[str]:
        (literal, _) = get_args(Source.model_fields[name].annotation)
        return set(get_args(literal))

    assert words("format") == set(Layout)
    assert words("file") == set(FileKind)
    assert set(ColumnsConfig.model_fields) == set(COLUMNS)


def test_transcripts_of_several_turns_are_parted_at_the_speakers() -> None:
    start = "\n\nHuman: Hi: Human: me\n\nAssistant:  Hello\n\nmy friend \n\nHuman: Why?\n\nAssistant:"
    pair = only(read({"chosen": start + " Because.\n", "rejected": start + " No"}))
    prompt = [user("Hi: Human: me"), judge("Hello\n\nmy friend"), user("Why?")]
    assert pair["prompt"] == prompt
    assert winner(pair) == "Because."
    assert conversation(pair["prompt"]) == "User: Hi: Human: me\n\nAssistant: Hello\n\nmy friend\n\nUser: Why?"


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("\n\nHuman: q\n\nAssistant:", "\n\nHuman: q\n\nAssistant: x", Reason.EMPTY_RESPONSE),
        ("\n\nHuman: q\n\nAssistant: x", "\n\nHuman: r\n\nAssistant: y", Reason.DIVERGING_PROMPT),
        ("\n\nHuman: q\n\nAssistant: x", "\n\nHuman: q\n\nAssistant: y\n\nHuman: z", Reason.DIVERGING_PROMPT),
        ("\n\nHuman: q\n\nAssistant: x", "x", Reason.BAD_TYPE),
        ("\n\nAssistant: x", "\n\nAssistant: y", Reason.MISSING_FIELD),
        ("\n\nHuman:\n\nAssistant: x", "\n\nHuman:\n\nAssistant: y", Reason.EMPTY_PROMPT),
    ],
)
def test_transcripts_that_are_no_pair(chosen: str, rejected: str, reason: Reason) -> None:
    good = LAYOUTS["hh-rlhf"][0]
    reading = read(good, good | {"chosen": good["chosen"] + "!"}, {"chosen": chosen, "rejected": rejected})
    assert reading.dropped["reason"].to_pylist() == [reason]


def test_trees_are_grouped_by_their_root() -> None:
    """Rows of one parent_id answer one instruction; a column `group` stands over it, and other layouts don't use it."""
    row = LAYOUTS["ultrainteract_pair"][0]
    deeper = row | {"trajectory": [said("user", "q"), said("assistant", "try"), said("user", "no")]}
    other = row | {"trajectory": [said("user", "r")], "parent_id": None}
    pairs = read(row, deeper, other).pairs.to_pylist()
    assert [pair["group"] for pair in pairs] == ["tree", "tree", prompt_key((("user", "r"),))]
    assert conversation(pairs[1]["prompt"]) == "User: q\n\nAssistant: try\n\nUser: no"
    assert only(read(row | {"group": "mine"}))["group"] == "mine"
    assert only(read(LAYOUTS["reward-bench"][0] | {"parent_id": "tree"}))["group"] == prompt_key((("user", "q"),))


def test_equal_scores_are_a_tie() -> None:
    row = LAYOUTS["ultrafeedback_binarized"][0] | {"score_rejected": 8.0}
    reading = read(row)
    assert reading.dropped.select(["reason", "detail"]).to_pylist() == [
        {"reason": "tie", "detail": "score_chosen and score_rejected are both 8.0"}
    ]
    assert read(row | {"score_rejected": None}).pairs.num_rows == 1
    written = read(row | {"score_chosen": "8.0", "score_rejected": "8"})  # as a CSV file has them
    assert written.counts["dropped"] == {"tie": 1}
    assert read(row | {"score_chosen": "good", "score_rejected": "good"}).pairs.num_rows == 1


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_typed_content_parts_are_put_together() -> None:
    row = {
        "prompt": [{"role": "user", "content": parts("q", "?")}],
        "chosen": [{"role": "assistant", "content": parts("good")}],
        "rejected": parts("b", "ad"),
    }
    pair = only(read_pairs_of(row))
    assert pair["prompt"] == [user("q?")]
    assert {pair["response_a"], pair["response_b"]} == {"good", "bad"}


def read_pairs_of(*rows: dict[str, Any]) -> Reading:
    """Read rows that no Arrow table can hold."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return check(read_pairs(jsonl(Path(folder) / "x.jsonl", *rows), name="x"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], Reason.NOT_TEXT),
        ([*parts("q"), {"type": "tool_use"}], Reason.NOT_TEXT),
        ([{"type": "text", "text": 1}], Reason.BAD_TYPE),
        (["q"], Reason.BAD_TYPE),
        ([], Reason.EMPTY_PROMPT),
    ],
)
def test_other_parts_are_a_reason(content: list[Any], reason: Reason) -> None:
    row = {"prompt": [{"role": "user", "content": content}], "chosen": "x", "rejected": "y"}
    reading = read_pairs_of(row, row | {"prompt": "q"})
    assert reading.dropped["reason"].to_pylist() == [reason]


NUMBERED = {"instruction": "q", "output_1": "x", "output_2": "y"}
ZEROED = {"prompt": "q", "response_0": "x", "response_1": "y"}
LETTERED = {"question": "q", "answer_a": "x", "answer_b": "y"}


@pytest.mark.parametrize(
    ("row", "value", "gold"),
    [
        *((NUMBERED, value, "A") for value in (1, 1.0, "1", "1.0", "output_1", "A", "model_1", "model_a")),
        *((NUMBERED, value, "B") for value in (2, 2.0, "2", "output_2", "b", "Model_2")),
        *((NUMBERED, value, Reason.TIE) for value in (0, 0.0, "0", 1.5, "tie", "Tie (bothbad)")),
        *((NUMBERED, value, Reason.BAD_LABEL) for value in (3, 1.2, -1, 10**400, "output_3", "")),
        *((ZEROED, value, "A") for value in (0, "0", "response_0")),
        *((ZEROED, value, "B") for value in (1, 1.0, "1", "response_1")),
        *((ZEROED, value, Reason.BAD_LABEL) for value in (2, -1, "2")),
        *((LETTERED, value, "A") for value in ("a", "model_a", "answer_a", " A ")),
        *((LETTERED, value, Reason.BAD_TYPE) for value in (0, 1, 1.0)),
        *((LETTERED, value, Reason.BAD_LABEL) for value in ("1", "0", "model_c")),
        *((row, True, Reason.BAD_TYPE) for row in (NUMBERED, ZEROED, LETTERED)),
        *((row, value, Reason.MISSING_FIELD) for row in (NUMBERED, ZEROED) for value in (None, float("nan"))),
    ],
)
@pytest.mark.parametrize("column", ["label", "winner", "preference", "better_response_id"])
def test_who_won_under_the_usual_names(row: dict[str, Any], value: object, gold: str | Reason, column: str) -> None:
    reading = read_pairs_of({**row, column: value}, {**row, "output_1": "z", "response_0": "z", "answer_a": "z"})
    found = [*reading.pairs["gold"].to_pylist(), *reading.dropped["reason"].to_pylist()]
    assert found[0] == gold


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ((1, 0, 0), "A"),
        ((0, 1, 0), "B"),
        (("0", "1.0", "0"), "B"),
        ((0, 0, 1), Reason.TIE),
        ((1, 1, 0), Reason.BAD_LABEL),
        ((0, 0, 0), Reason.BAD_LABEL),
        ((0.5, 0.5, 0), Reason.BAD_LABEL),
        ((None, 1, 0), Reason.MISSING_FIELD),
        (("x", 1, 0), Reason.BAD_LABEL),
    ],
)
def test_a_column_each_for_both_and_a_tie(marks: tuple[Any, ...], found: str | Reason) -> None:
    row = LAYOUTS["arena-human-preference-55k"][0]
    names = ("winner_model_a", "winner_model_b", "winner_tie")
    reading = read_pairs_of(row | dict(zip(names, marks, strict=True)))
    assert [*reading.pairs["gold"].to_pylist(), *reading.dropped["reason"].to_pylist()] == [found]


def test_arena_rows_of_several_turns() -> None:
    row = LAYOUTS["arena-human-preference-55k"][0]
    same = row | {"prompt": '["q","r"]', "response_a": '["h","bad"]', "response_b": '["h","good"]'}
    other = row | {"prompt": '["q","r"]', "response_a": '["h","bad"]', "response_b": '["i","good"]'}
    null = row | {"prompt": '["q"]', "response_a": "[null]"}
    short = row | {"prompt": '["q","r"]'}
    reading = read(same, other, null, short, row | {"prompt": "q", "response_a": "[bad", "response_b": "good"})
    assert reading.dropped["reason"].to_pylist() == [Reason.DIVERGING_PROMPT, Reason.MISSING_FIELD, Reason.BAD_TYPE]
    assert [pair["prompt"] for pair in reading.pairs.to_pylist()] == [[user("q"), judge("h"), user("r")], [user("q")]]


@pytest.mark.parametrize(
    ("votes", "found"),
    [
        ((1, 1, 2), "A"),
        ((2, 2, 0), "B"),
        ((2, None, 2), "B"),
        ((1, 2, 0), Reason.TIE),
        ((1, 0, 0), Reason.TIE),
        ((1, 2, None), Reason.TIE),
        ((1, None, None), "A"),
        (("2", "", "2"), "B"),
        ((2, math.nan, 2), "B"),
        ((0, 0, 0), Reason.TIE),
        ((1, 1, 7), Reason.BAD_LABEL),
        ((None, None, None), Reason.MISSING_FIELD),
    ],
)
def test_annotators_need_a_majority(votes: tuple[Any, ...], found: str | Reason) -> None:
    row = LAYOUTS["pandalm"][0]
    names = ("annotator1", "annotator2", "annotator3")
    reading = read_pairs_of(row, row | {"instruction": "other"} | dict(zip(names, votes, strict=True)))
    second = [*reading.pairs["gold"].to_pylist()[1:], *reading.dropped["reason"].to_pylist()]
    assert second == [found]


def test_an_input_stands_below_its_instruction() -> None:
    row = LAYOUTS["pandalm"][0] | {"input": "this"}
    assert only(read(row))["prompt"] == [user("q\n\nthis")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "x", "label": True},
        {"prompt": [user("q")], "completion": [judge("x")], "label": False},
        {"question": "q", "response": "x", "score": 0.5},
    ],
)
def test_unpaired_data_is_one_sentence(row: dict[str, Any], tmp_path: Path) -> None:
    for file in (jsonl(tmp_path / "x.jsonl", row), tmp_path / "x.parquet"):
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), file)
        with pytest.raises(DataError, match="is unpaired: it has one answer a row") as error:
            read_pairs(file, name="x")
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(str(file))


def test_rankings_of_three_are_no_pairs() -> None:
    with pytest.raises(DataError, match="pairs need"):
        read(ZEROED | {"response_2": "z", "label": 0})


COLUMNED = {"q": "q", "left": "good", "right": "bad", "who": "A", "topic": "t", "prompt": "hidden"}
NAMED = {
    "prompt": "q",
    "response_a": "left",
    "response_b": "right",
    "label": "who",
    "subset": "topic",
    "group": "topic",
}


def test_columns_can_be_named(tmp_path: Path) -> None:
    form = make_form(file=None, layout=None, columns=NAMED)
    pair = only(read(COLUMNED, form=form))
    assert (pair["prompt"], winner(pair), pair["subset"], pair["group"]) == ([user("q")], "good", "t", "t")
    file = jsonl(tmp_path / "x.jsonl", COLUMNED)
    assert only(read_pairs(file, name="x", form=form)) == pair


@pytest.mark.parametrize(("label", "gold"), [("left", "A"), ("RIGHT", "B"), ("response_a", None), ("b", "B")])
def test_a_label_may_name_the_source_s_own_columns(label: str, gold: str | None) -> None:
    form = make_form(file=None, layout=None, columns=NAMED)
    found = read(COLUMNED | {"who": label}, form=form)
    assert found.pairs["gold"].to_pylist() == ([gold] if gold else [])


def test_two_label_columns_are_a_doubt_until_one_is_named() -> None:
    row = {"prompt": "q", "response_a": "good", "response_b": "bad", "label": "B", "winner": "A"}
    with pytest.raises(DataError, match=r"has both .*label and .*winner: say which by `format` or `columns`"):
        read(row)
    named = make_form(file=None, layout=None, columns={"label": "winner"})
    assert winner(only(read(row, form=named))) == "good"


def test_a_named_sharegpt_needs_no_other_column_to_be_gone() -> None:
    row = LAYOUTS["sharegpt"][0] | {"question": None}
    assert winner(only(read(row, form=Form(layout=Layout.SHAREGPT)))) == "good"


def test_a_column_named_for_another_label() -> None:
    row = LAYOUTS["pku-saferlhf"][0]
    safer = make_form(file=None, layout=None, columns={"label": "safer_response_id"})
    assert winner(only(read(row, form=safer))) == "bad"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"columns": {"prompt": "nope"}}, "has no column 'nope' to take as `prompt`"),
        ({"layout": "transcript"}, "pairs of the format `transcript` need"),
        ({"columns": {"promt": "q"}}, "'promt' is no column that a pair has"),
        ({"layout": "hh"}, "'hh' is no format that is read"),
        ({"file": "xlsx"}, "'xlsx' is no format that is read"),
    ],
)
def test_a_form_that_doesnt_fit_is_one_sentence(form: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        read(LAYOUTS["reward-bench"][0], form=make_form(**{"file": None, "layout": None, "columns": {}, **form}))
    assert "\n" not in str(error.value)


def test_a_named_layout_stands_over_a_doubt() -> None:
    both = LAYOUTS["reward-bench"][0] | LAYOUTS["pku-saferlhf"][0]
    with pytest.raises(DataError, match="say which by `format`"):
        read(both)
    assert winner(only(read(both, form=Form(layout=Layout.LABELLED)))) == "good"
    assert shown(read(both, form=Form(layout=Layout.CHOSEN))).startswith("chosen")
