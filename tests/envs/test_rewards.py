"""Rewards: what each scores, and what any of them may return."""

import asyncio
import math
import sys

import numpy as np
import pytest
import torch

from polopt.envs.answers import after_hashes, after_word, in_tags, last_boxed
from polopt.envs.contract import RewardError, checked, name_of, text_of
from polopt.envs.form_rewards import Length, Repetition, TextFormat
from polopt.envs.rewards import (
    BySource,
    FromFile,
    Gsm8k,
    MathVerify,
    score_gsm8k,
)


def says(*texts):
    """Each text, as a text and as the last message of a conversation."""
    return [*texts, *([{"role": "tool", "content": "x"}, {"content": t}] for t in texts)]


def test_the_text_of_a_completion():
    assert text_of("a") == "a"
    assert text_of([{"content": "x"}, {"content": "a"}]) == "a"
    assert text_of([{"role": "assistant", "tool_calls": [], "content": None}]) == ""
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert text_of([{"content": parts}]) == "ab"
    assert text_of([]) == ""


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (after_hashes, "#### 3 then #### 1,234.", "1234"),
        (after_hashes, "#### $-5", "-5"),
        (after_hashes, "5", None),
        (last_boxed, r"\boxed{1} or \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
        (last_boxed, r"\boxed{1} or \boxed{2", None),
        (last_boxed, "1", None),
        (lambda t: after_word(t, "Answer"), "answer: 3\nAnswer : $4$\n", "4"),
        (lambda t: after_word(t, "Answer"), "4", None),
        (lambda t: in_tags(t, "a"), "<a>1</a> <a> 2 </a> 3", "2"),
        (lambda t: in_tags(t, "a"), "<a>1</a> <a> 2", None),
    ],
)
def test_final_answers_are_found(find, text, found):
    assert find(text) == found


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("#### 1,000", "1000", 1.0),
        ("a #### 3 b #### 4.", "4", 1.0),
        ("4", "4", 0.0),
        ("#### -2", "2", 0.0),
        ("", "4", 0.0),
        ("#### 72", "48 + 24 = 72\n#### 72", 1.0),
        ("#### 7", 7, 1.0),
    ],
)
def test_gsm8k(text, answer, score):
    assert score_gsm8k(text, answer) == score
    assert Gsm8k()(completions=says(text), answer=[answer] * 2) == [score] * 2


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"so \boxed{\frac12}", "0.5", 1.0),
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{1+x^2}", "$x^2+1$", 1.0),
        (r"\boxed{4} no, \boxed{5}", r"it is \boxed{4}", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{4}", "", None),
    ],
)
def test_math(text, answer, score):
    pytest.importorskip("math_verify")
    assert MathVerify()(completions=says(text), answer=[answer] * 2) == [score] * 2


def test_math_outside_of_a_box():
    pytest.importorskip("math_verify")
    assert MathVerify(boxed=False)(completions=["it is $4$"], answer=["4"]) == [1.0]


def test_sources():
    pytest.importorskip("math_verify")
    rows = {
        "openai/gsm8k": ("#### 7", "7", 1.0),
        "lighteval/MATH": (r"\boxed{\frac12}", "0.5", 1.0),
        "DigitalLearningGmbH/MATH-lighteval": ("7", "7", 0.0),
        "HuggingFaceH4/MATH-500": (r"\boxed{7}", "8", 0.0),
        "math_dapo": ("Answer: 34", "34", 1.0),
        "aime2024": ("34", "34", -1.0),
        "numina_cn_k12": (r"\boxed{3}", "3", 1.0),
    }
    texts, answers, scores = map(list, zip(*rows.values(), strict=True))
    reward = BySource()
    assert reward(completions=texts, answer=answers, data_source=list(rows)) == scores
    assert [reward.extract(t) for t in texts[:5]] == ["7", r"\frac12", None, "7", "34"]
    reward.check(rows)
    with pytest.raises(RewardError, match="no built-in reward for data_source 'mine'"):
        reward.check(["openai/gsm8k", "mine"])
    with pytest.raises(RewardError, match=r"no built-in reward for data_source 'mine'.*FromFile"):
        reward(completions=["x"], answer=["y"], data_source=["mine"])
    with pytest.raises(RewardError, match="no column 'data_source', by which"):
        reward(completions=["x"], answer=["y"])


def test_a_reward_of_a_file(tmp_path):
    (tmp_path / "r.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str == ground_truth\n"
        "    return {'score': float(right), 'other': 1} if extra_info else 0.5\n"
    )
    path = str(tmp_path / "r.py")
    reward = FromFile(path=path, name="score")
    columns = {"answer": ["a"] * 3, "extra_info": [{"i": 1}, {"i": 1}, None]}
    assert reward(completions=[*says("a"), "a"], **columns) == [1.0, 1.0, 0.5]
    with pytest.raises(RewardError, match="has no function 'nope'"):
        FromFile(path=path, name="nope")(completions=["x"])
    with pytest.raises(RewardError, match=r"there is no Python file '/no\.py'"):
        FromFile(path="/no.py")(completions=["x"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>c</answer> ", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("x <think>a</think><answer>c</answer>", 0.0),
        ("<think>a</think> x <answer>c</answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>c</answer><answer>c</answer>", 0.0),
        ("<think>a<answer>c</think></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text, score):
    assert TextFormat(tags=("think", "answer"))(completions=says(text)) == [score] * 2


def test_patterns():
    reward = TextFormat(pattern=r"a.*\d")
    assert reward(completions=["a\n1", "a1 ", "b1"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a pattern or tags"),
        ({"pattern": "a", "tags": ("b",)}, "either a pattern or tags"),
        ({"pattern": "("}, r"pattern '\(' is no regular expression"),
        ({"tags": ("<think>",)}, "tags are names such as think, got '<think>'"),
    ],
)
def test_formats_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextFormat(**arguments)


def test_length_and_repetition():
    ids = [[0] * n for n in (2, 4, 6, 8, 99)]
    assert Length(limit=8, cache=4)(completion_ids=ids) == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match=r"cache must be in \[1, limit=8\], got 9"):
        Length(limit=8, cache=9)
    ids = [[], [1], [1, 2, 3, 4], [1, 2, 1, 2, 1], [5] * 6]
    assert Repetition(ngram=2)(completion_ids=ids) == pytest.approx([0, 0, 0, -0.5, -0.8])
    assert Repetition(ngram=3)(completion_ids=[[1, 2, 1, 2, 1, 2, 1]]) == [2 / 5 - 1]
    with pytest.raises(ValueError, match="ngram must be at least 1, got 0"):
        Repetition(ngram=0)


@pytest.mark.parametrize(
    "found",
    [
        [1, None, math.nan, True],
        (1.0, None, None, 1),
        np.array([1.0, np.nan, np.nan, 1.0]),
        torch.tensor([1.0, math.nan, math.nan, 1.0]),
        [torch.tensor(1.0), None, np.float32("nan"), np.int64(1)],
    ],
)
def test_numbers_of_any_kind_are_taken(found):
    assert checked(lambda **_: found)(completions="abcd") == [1.0, None, None, 1.0]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (0.5, r"returned 0.5 \(float\), expected a list of 2 numbers, one for each completion"),
        (None, r"returned None, expected a list of 2"),
        ("ab", r"returned 'ab' \(str\), expected a list of 2"),
        ({"score": 1}, r"returned \{'score': 1\} \(dict\), expected"),
        ([1.0], r"returned 1 scores, expected a list of 2"),
        (np.zeros((2, 1)), r"returned shape \(2, 1\), expected"),
        (torch.tensor(1.0), r"returned tensor\(1.\) \(Tensor\), expected|returned shape \(\)"),
        ([1, "0.5"], r"gave '0.5' \(str\) to completion 1, expected a finite number, or None"),
        ([1, [0.5]], r"gave \[0.5\] \(list\) to completion 1"),
        ([1, math.inf], r"gave inf \(float\) to completion 1"),
    ],
)
def test_anything_else_is_one_sentence(found, message):
    def mine(**_):
        return found

    with pytest.raises(RewardError, match=f"the reward 'mine' {message}") as caught:
        checked(mine)(completions=["a", "b"])
    assert "\n" not in str(caught.value)


def test_exceptions_name_the_reward_and_the_line():
    def mine(completions, **_):
        return [1 / 0 for _ in completions]

    with pytest.raises(
        RewardError,
        match=r"'mine' raised ZeroDivisionError: division by zero \(test_rewards.py, line \d+\)",
    ):
        checked(mine)(completions=["a"])

    def strict(completions):
        return [1.0]

    with pytest.raises(RewardError, match=r"unexpected keyword.*take \*\*columns"):
        checked(strict)(completions=["a"], answer=["b"])


def test_async_rewards_stay_async():
    class Judge:
        async def __call__(self, completions, **_):
            await asyncio.sleep(0)
            return [len(c) if c else "x" for c in completions]

    reward = checked(Judge())
    assert asyncio.iscoroutinefunction(reward)
    assert name_of(reward) == "Judge"
    assert asyncio.run(reward(completions=["ab"])) == [2.0]
    with pytest.raises(RewardError, match="'Judge' gave 'x'"):
        asyncio.run(reward(completions=[""]))


def test_math_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs math-verify: pip install 'polopt\[math\]'"
    ):
        MathVerify()
    BySource().check(["openai/gsm8k"])
    with pytest.raises(RewardError, match="needs math-verify: pip install"):
        BySource().check(["openai/gsm8k", "lighteval/MATH"])
