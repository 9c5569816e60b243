"""Write preference pairs whose label is true by construction: the data of `make demo`.

A category is one rule about the surface or the meaning of a short answer ("end with a question mark", "mention an
animal"). Both answers of a pair are drawn from the same sentences about the same topic; only the text that the rule is
about differs, so length and position tell nothing. Where a rule is about a mark, the wrong answer often carries another
mark, so "the unusual answer wins" is no strategy either. Row i of a seed depends on the seed, the categories and i
alone: ranges of rows can be generated apart.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

VERSION = 1  # part of the step keys: raise it when the same arguments make other rows

SCHEMA = pa.schema(
    [
        pa.field(name, pa.large_string(), nullable=False)
        for name in ("prompt", "response_a", "response_b", "label", "subset", "rationale", "rationale_swapped")
    ]
)

_ADJECTIVES = (
    "red", "blue", "green", "small", "tall", "old", "new", "dark", "bright", "quiet", "loud", "cold", "warm",
    "heavy", "light", "round", "flat", "broken", "clean", "dusty", "empty", "plain", "rusty", "shiny", "soft",
)  # fmt: skip
_NOUNS = (
    "boat", "house", "lamp", "chair", "bridge", "clock", "garden", "market", "tower", "train", "window",
    "basket", "bottle", "candle", "carpet", "mirror", "engine", "hammer", "ladder", "pillow", "kettle",
    "wagon", "statue", "fence", "bench", "cabin", "tunnel", "wallet", "bell", "desk", "drum", "flag", "coat",
    "rope", "gate",
)  # fmt: skip
_VERBS = (
    "stands", "waits", "rests", "stays", "sits", "lies",
)  # fmt: skip
_PLACES = (
    "by the river", "near the door", "in the valley", "on the hill", "at the corner", "under the stars",
    "behind the wall", "along the road", "in the rain", "past the mill",
)  # fmt: skip
_WORDS = (
    "silver", "winter", "music", "paper", "coffee", "summer", "money", "stone", "sugar", "cotton", "butter",
    "thunder",
)  # fmt: skip
_ANIMALS = (
    "dog", "cat", "horse", "sheep", "tiger", "rabbit", "mouse", "goat", "lion", "wolf",
)  # fmt: skip
_FRUITS = (
    "apple", "pear", "mango", "grape", "peach", "lemon", "plum", "cherry", "banana", "melon",
)  # fmt: skip
_TOOLS = (
    "saw", "axe", "shovel", "drill", "spade", "rake", "pliers", "knife", "wrench", "chisel",
)  # fmt: skip


class _Draft(NamedTuple):
    """What a rule makes of a topic: the request, and text and description of the right and the wrong answer."""

    prompt: str
    right: str
    wrong: str
    why_right: str
    why_wrong: str


_Rule = Callable[[random.Random, str], _Draft]


def _sentence(rng: random.Random, topic: str) -> str:
    return f"the {topic} {rng.choice(_VERBS)} {rng.choice(_PLACES)}"


def _capitals(rng: random.Random, topic: str) -> _Draft:
    right, wrong = _sentence(rng, topic).upper(), _sentence(rng, topic)
    wrong, why = (wrong.title(), "only starts words so") if rng.random() < 0.5 else (wrong, "is in small letters")
    return _Draft(f"Write about a {topic} in capital letters.", f"{right}.", f"{wrong}.", "is in capitals", why)


def _ending(request: str, mark: str, name: str, others: Mapping[str, str]) -> _Rule:
    def rule(rng: random.Random, topic: str) -> _Draft:
        other = rng.choice(sorted(others))
        right, wrong = f"{_sentence(rng, topic)}{mark}", f"{_sentence(rng, topic)}{other}"
        return _Draft(request.format(topic=topic), right, wrong, f"ends with {name}", f"ends with {others[other]}")

    return rule


def _contains(rng: random.Random, topic: str) -> _Draft:
    word, other = rng.sample(_WORDS, 2)
    right, wrong = f"{_sentence(rng, topic)} with {word}.", f"{_sentence(rng, topic)} with {other}."
    return _Draft(f"Write about a {topic} and use the word {word}.", right, wrong, f"has {word}", f"has {other}")


def _avoids(rng: random.Random, topic: str) -> _Draft:
    word, other = rng.sample(_WORDS, 2)
    right, wrong = f"{_sentence(rng, topic)} with {other}.", f"{_sentence(rng, topic)} with {word}."
    return _Draft(f"Write about a {topic} without the word {word}.", right, wrong, f"has {other}", f"has {word}")


def _starts(rng: random.Random, topic: str) -> _Draft:
    word, other = rng.sample(_WORDS, 2)
    right, wrong = f"{word}, {_sentence(rng, topic)}, {other}.", f"{other}, {_sentence(rng, topic)}, {word}."
    prompt = f"Write about a {topic}, starting with {word}."
    return _Draft(prompt, right, wrong, f"starts with {word}", f"starts with {other}")


def _number(rng: random.Random, topic: str) -> _Draft:
    digits, words = str(rng.randint(1000, 9999)), rng.choice(("many", "some", "more", "most"))
    right, wrong = f"{_sentence(rng, topic)} for {digits} days.", f"{_sentence(rng, topic)} for {words} days."
    return _Draft(f"Write about a {topic} with a number.", right, wrong, f"has {digits}", f"has {words}")


def _mentions(kind: str, members: Sequence[str], foils: Sequence[str]) -> _Rule:
    def rule(rng: random.Random, topic: str) -> _Draft:
        member, foil = rng.choice(members), rng.choice(foils)
        right, wrong = f"{_sentence(rng, topic)} with a {member}.", f"{_sentence(rng, topic)} with a {foil}."
        return _Draft(f"Write about a {topic} and {kind}.", right, wrong, f"has a {member}", f"has a {foil}")

    return rule


def _quotes(rng: random.Random, topic: str) -> _Draft:
    right, wrong = f'"{_sentence(rng, topic)}"', f"({_sentence(rng, topic)})"
    return _Draft(f"Write about a {topic} in quotation marks.", right, wrong, "is in quotes", "is in brackets")


_QUESTION, _EXCLAMATION, _STOP = "a question mark", "an exclamation mark", "a full stop"
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "capitals": _capitals,
        "question": _ending("Ask a question about a {topic}.", "?", _QUESTION, {".": _STOP, "!": _EXCLAMATION}),
        "contains": _contains,
        "avoids": _avoids,
        "starts": _starts,
        "number": _number,
        "animal": _mentions("an animal", _ANIMALS, _TOOLS),
        "exclamation": _ending("Shout about a {topic}.", "!", _EXCLAMATION, {".": _STOP, "?": _QUESTION}),
        "quotes": _quotes,
        "fruit": _mentions("a fruit", _FRUITS, _TOOLS),
    }
)

IN_DISTRIBUTION = ("capitals", "question", "contains", "avoids", "starts", "number", "animal")
OUT_OF_DISTRIBUTION = ("exclamation", "quotes", "fruit")


def _topic(index: int, seed: int, category: str) -> str:
    """Return topic `index` of a seeded walk that visits every adjective and noun once before it repeats."""
    count = len(_ADJECTIVES) * len(_NOUNS)
    rng = random.Random(f"topics:{seed}:{category}")
    step = rng.choice([s for s in range(count // 3, count) if math.gcd(s, count) == 1])
    adjective, noun = divmod((rng.randrange(count) + index * step) % count, len(_NOUNS))
    return f"{_ADJECTIVES[adjective]} {_NOUNS[noun]}"


def _row(index: int, category: str, label: str, seed: int) -> dict[str, str]:
    """Write row `index` of a category with the right answer in the place `label`."""
    draft = _RULES[category](random.Random(f"{seed}:{category}:{index}"), _topic(index, seed, category))
    first_right = f"A {draft.why_right}: yes. B {draft.why_wrong}: no. [[A]]"
    first_wrong = f"A {draft.why_wrong}: no. B {draft.why_right}: yes. [[B]]"
    right_is_a = label == "A"
    return {
        "prompt": draft.prompt,
        "response_a": draft.right if right_is_a else draft.wrong,
        "response_b": draft.wrong if right_is_a else draft.right,
        "label": label,
        "subset": category,
        "rationale": first_right if right_is_a else first_wrong,
        "rationale_swapped": first_wrong if right_is_a else first_right,
    }


def generate(categories: Sequence[str], count: int, *, seed: int, start: int = 0) -> pa.Table:
    """Write rows `start` to `start + count` of a seed, the categories in turn, as a table of `SCHEMA`.

    The labels of two neighbouring rows of a category differ, in a seeded order, so every category is balanced. Prompts
    are distinct within `875 * len(categories)` rows, whichever calls they come from. `rationale` argues for the order
    shown, `rationale_swapped` for the same pair with A and B exchanged; both end with their verdict.

    Raises:
        ValueError: a category is unknown or given twice, none is given, or `count` or `start` is negative.

    """
    unknown = sorted(set(categories) - set(_RULES))
    if unknown or not categories or len(set(categories)) != len(categories):
        given = ", ".join(categories) or "none"
        raise ValueError(f"categories must be distinct names of {', '.join(_RULES)}; got {given}")
    if count < 0 or start < 0:
        raise ValueError(f"count and start must not be negative; got {count} and {start}")
    rows = []
    for position in range(start, start + count):
        index, place = divmod(position, len(categories))
        category = categories[place]
        flip = random.Random(f"labels:{seed}:{category}:{index // 2}").random() < 0.5
        rows.append(_row(index, category, "AB"[(index + flip) % 2], seed))
    return pa.Table.from_pylist(rows, schema=SCHEMA)
