"""Say why a row of a source is no pair."""

from __future__ import annotations

from enum import StrEnum

MAX_ROW = 16 * 2**20  # bytes of a row of a text file, characters of a row's texts


class Reason(StrEnum):
    """Say why a row of a source is no pair, or a pair is in no split."""

    BAD_JSON = "bad_json"
    BAD_CSV = "bad_csv"  # a stray quote, or more or fewer fields than the header
    BAD_ENCODING = "bad_encoding"  # not UTF-8, a lone surrogate or a null byte
    BAD_TYPE = "bad_type"
    BAD_LABEL = "bad_label"  # a text or number that is neither A, B nor a tie
    MISSING_FIELD = "missing_field"
    TOO_LARGE = "too_large"  # over MAX_ROW: no conversation
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_RESPONSE = "empty_response"
    IDENTICAL_RESPONSES = "identical_responses"  # but for spaces around them
    DIVERGING_PROMPT = "diverging_prompt"  # the two responses answer different conversations
    NOT_TEXT = "not_text"  # a content part that is no text: an image, a tool call
    TIE = "tie"  # also: annotators without a majority, equal scores of chosen and rejected
    DUPLICATE = "duplicate"  # the same pair, or its order-swapped twin, with the same winner
    CONFLICTING_LABEL = "conflicting_label"  # the same pair, or its twin, with another winner: all of them are dropped
    TOO_LONG = "too_long"  # over the token budget
    CONTAMINATED = "contaminated"  # a training pair whose prompt is in dev, test or a suite


class BadRow(Exception):
    """Carry why a row is no pair, and what exactly was found."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
