"""Text tasks: held-out problems stay held out."""

import pytest

pytest.importorskip("reasoning_gym")

from polopt.envs.text import TextTask, arithmetic, held_out, reasoning_gym


def prompts(rows):
    return {row["prompt"] for row in rows}


def test_train_and_evaluation_share_no_problem():
    task = arithmetic(train_size=300, evaluation_size=80)
    assert len(prompts(task.train)) == 300
    assert len(prompts(task.evaluation)) == 80
    assert not prompts(task.train) & prompts(task.evaluation)


def test_no_seed_or_size_moves_a_problem_across():
    one = arithmetic(train_size=400, evaluation_size=100)
    two = arithmetic(train_size=200, evaluation_size=50, seed=5)
    assert prompts(one.train) != prompts(two.train)
    assert not (prompts(one.train) | prompts(two.train)) & (
        prompts(one.evaluation) | prompts(two.evaluation)
    )
    assert all(held_out(p) for p in prompts(one.evaluation))
    assert sum(map(held_out, map(str, range(5000)))) / 5000 == pytest.approx(0.2, abs=0.02)


def test_answers_are_right_and_the_verifier_says_so():
    task = arithmetic(train_size=100, evaluation_size=20, terms=(2, 4), digits=(1, 2))
    for row in task.train:
        assert eval(row["prompt"].removesuffix("=")) == int(row["answer"])
    rows = list(task.evaluation)
    right = [row["answer"] for row in rows]
    wrong = [str(int(row["answer"]) + 1) for row in rows]
    assert task.correct(rows, right) == [True] * 20
    assert task.correct(rows, wrong) == [False] * 20
    assert task.correct(rows, [""] * 20) == [False] * 20
    assert task.correct([], []) == []
    message = [[{"role": "assistant", "content": f" {a} "}] for a in right]
    assert task.rewards[0](completions=message, answer=right) == [1.0] * 20


def test_same_seed_same_problems():
    assert arithmetic(train_size=50).train == arithmetic(train_size=50).train


def test_any_dataset_of_reasoning_gym():
    task = reasoning_gym(dataset="leg_counting", train_size=30, evaluation_size=10, seed=3)
    assert (len(prompts(task.train)), len(prompts(task.evaluation))) == (30, 10)
    assert not prompts(task.train) & prompts(task.evaluation)
    rows = list(task.evaluation)
    right = [row["answer"] for row in rows]
    try:
        assert task.correct(rows, right) == [True] * 10
        tagged = [f"so <answer>{answer}</answer>." for answer in right]
        assert task.correct(rows, tagged) == [True] * 10
        assert task.correct(rows, ["<answer>-1</answer>"] * 10) == [False] * 10
    finally:
        task.rewards[0].close()
    assert task.final_answer("so <answer>7</answer>") == "7"
    talk = reasoning_gym(dataset="leg_counting", train_size=2, evaluation_size=2, seed=3,
                         system_prompt="be brief", reward_timeout=None)  # fmt: skip
    assert [m["role"] for m in talk.train[0]["prompt"]] == ["system", "user"]
    assert talk.correct(talk.train, [row["answer"] for row in talk.train]) == [True] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "no_such"}, "reasoning-gym refuses no_such with"),
        ({"dataset": "leg_counting", "settings": {"legs": 3}}, "reasoning-gym refuses leg_count"),
        ({"dataset": "leg_counting", "train_size": 0}, "train_size must be at least 1, got 0"),
    ],
)
def test_what_reasoning_gym_does_not_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym(**arguments)


def test_overlap_is_refused():
    row = {"prompt": "1 + 1 ="}
    with pytest.raises(ValueError, match=r"1 prompts are in train and in evaluation.*1 \+ 1"):
        TextTask(name="x", train=[row], evaluation=[row], rewards=[len])


def test_final_answers_are_what_majorities_are_counted_over():
    parts = {"train": [{"prompt": "a"}], "evaluation": [{"prompt": "b"}], "rewards": [len]}
    plain = TextTask(name="x", **parts)
    assert plain.final_answer(" so it is 7\n") == "so it is 7"

    def last(text):
        return text.rpartition("####")[2] if "####" in text else None

    task = TextTask(name="x", **parts, extract=last)
    assert task.final_answer("so #### 7") == task.final_answer("or #### 7 ") == "7"
    assert task.final_answer(" none ") == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"terms": (2, 2), "train_size": 500}, "train_size=500.*has only .* ask for fewer"),
        ({"terms": (3, 2)}, "reasoning-gym refuses chain_sum"),
        ({"digits": (0, 1)}, "reasoning-gym refuses chain_sum"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        arithmetic(**arguments)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": []}, "train is empty"),
        ({"rewards": []}, "rewards is empty"),
        ({"train": [{"question": "?"}]}, r"train\[0\] has no 'prompt', only \['question'\]"),
    ],
)
def test_broken_tasks_are_refused(parts, message):
    whole = {"train": [{"prompt": "a"}], "evaluation": [{"prompt": "b"}], "rewards": [len]}
    with pytest.raises(ValueError, match=message):
        TextTask(name="x", **{**whole, **parts})
