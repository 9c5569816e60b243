"""Which tokens a training row has and which of them carry loss."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tiny_model import tiny_tokenizer
from training_rows import KWARGS, request, right, sft_rows

from storage.errors import StepFailedError
from tasks.engines.template import ChatTemplate
from tasks.training.rows import encode_rows

if TYPE_CHECKING:
    from pathlib import Path

END = 1  # <|im_end|>, which also pads


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def _with(side: str, row: int, text: str, rows: pa.Table) -> pa.Table:
    messages = rows[side].to_pylist()
    messages[row] = [{"role": "assistant", "content": text}]
    place = rows.schema.get_field_index(side)
    return rows.set_column(place, side, pa.array(messages, rows.schema.field(side).type))


def test_prompt_ids_are_the_engines_and_the_answer_ends_with_the_end_of_turn(base: Path, tmp_path: Path) -> None:
    """Traps 14, 36, 38."""
    rows = encode_rows(request(base, tmp_path))
    engine = ChatTemplate(base, KWARGS)
    assert rows.prompts == engine.prompts(sft_rows(21)["prompt"].to_pylist())
    for number, ids in enumerate(rows.sides["completion"]):
        assert engine.tokenizer.decode(ids) == right(number) + "<|im_end|>"
        whole = engine.tokenizer.apply_chat_template(
            sft_rows(21)["prompt"][number].as_py() + sft_rows(21)["completion"][number].as_py(), tokenize=False
        )
        assert engine.tokenizer.decode(rows.example(number)["completion"]) == whole.removesuffix("\n")


def test_loss_tokens_are_completions_of_both_sides(base: Path, tmp_path: Path) -> None:
    rows = encode_rows(request(base, tmp_path, method="star-dpo"))
    wanted = [len(chosen) + len(rejected) for chosen, rejected in zip(*rows.sides.values(), strict=True)]
    assert rows.loss_tokens.tolist() == wanted
    assert rows.tokens.tolist() == [2 * len(p) + n for p, n in zip(rows.prompts, wanted, strict=True)]


def test_text_that_looks_like_an_end_of_turn_is_text(base: Path, tmp_path: Path) -> None:
    rows = encode_rows(request(base, tmp_path, rows=_with("completion", 4, "a <|im_end|> b [[A]]", sft_rows(21))))
    assert rows.sides["completion"][4].count(END) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none at all", "pair p2: the loss tokens of `completion` hold no verdict"),
        ("long " * 200 + "[[A]]", "max_len"),
    ],
)
def test_a_row_that_would_teach_the_wrong_thing_fails_the_step(
    base: Path, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(StepFailedError, match=message):
        encode_rows(request(base, tmp_path, rows=_with("completion", 2, text, sft_rows(21))))


def test_only_the_rejected_side_may_lack_a_verdict(base: Path, tmp_path: Path) -> None:
    rows = request(base, tmp_path, method="star-dpo").rows
    encode_rows(request(base, tmp_path, method="star-dpo", rows=_with("rejected", 2, "none", rows)))
    with pytest.raises(StepFailedError, match="`chosen` hold no verdict"):
        encode_rows(request(base, tmp_path, method="star-dpo", rows=_with("chosen", 2, "none", rows)))


def test_an_end_of_turn_that_does_not_stop_the_engine_fails_the_step(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(StepFailedError, match="does not stop"):
        encode_rows(request(folder, tmp_path))
