"""Rows of files as a task: columns, conversations, long prompts, held-out rows, and bad input."""

import json

import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")
import pyarrow
import pyarrow.parquet as pq

from polopt.envs.dataset import dataset
from polopt.envs.form_rewards import Length, TextFormat
from polopt.envs.isolation import Isolated
from polopt.envs.rewards import Gsm8k, MathVerify


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def parquet(path, rows):
    pq.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def sums(count, start=0):
    return [{"question": f"{i} + 2 =", "answer": str(i + 2)} for i in range(start, start + count)]


def verl(count, start=0):
    """Rows as verl prepares them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 2 ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 2)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(start, start + count)
    ]


def task(files, **settings):
    files = [files] if isinstance(files, str) else files
    settings = {"rewards": [Gsm8k()], "reward_timeout": None, **settings}
    return dataset(train_files=files, **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of words that has a chat template, and one without."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "+", "=", "be", "brief", "user", "system", *map(str, range(100))]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>")
    plain, folder = (str(tmp_path_factory.mktemp(n)) for n in ("plain", "chat"))
    tokenizer.save_pretrained(plain)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }} {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return {"chat": folder, "plain": plain}


# --- reading ------------------------------------------------------------------


def test_files_of_verl_are_read_as_they_are(tmp_path):
    found = dataset(
        train_files=[
            parquet(tmp_path / "a.parquet", verl(20)),
            lines(tmp_path / "b.jsonl", verl(5, 20)),
        ],
        eval_files=[parquet(tmp_path / "v.parquet", verl(4, 50))],
    )
    assert (len(found.train), len(found.evaluation)) == (25, 4)
    row = found.train[24]
    assert row["prompt"] == [{"role": "user", "content": "24 + 2 ="}]
    assert row["answer"] == "26"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "26"}
    assert row["extra_info"] == {"index": 24, "split": "train"}
    report = found.check()
    assert report["train"] == {
        "rows": 25, "empty": 0, "too_long": 0, "cut": 0, "kept": 25, "share_dropped": 0.0,
        "longest": None,
    }  # fmt: skip
    assert report["evaluated_and_trained"] == 0
    (reward,) = found.rewards
    assert isinstance(reward, Isolated)
    rows = list(found.evaluation)
    assert found.correct(rows, [f"#### {i + 2}" for i in (50, 51, 52, 99)]) == [True] * 3 + [False]
    assert found.final_answer("so #### 7 ") == "7"
    reward.close()


def test_columns_are_named_and_others_stay(tmp_path):
    rows = [{**row, "solution": "#### 1", "level": i} for i, row in enumerate(sums(3))]
    found = task(lines(tmp_path / "t.jsonl", rows), prompt_key="question", answer_key="solution")
    assert found.train[0] == {"prompt": "0 + 2 =", "answer": "#### 1", "level": 0}
    found = task(lines(tmp_path / "t.jsonl", rows), prompt_key="question")
    assert found.train[1]["answer"] == "3"
    nested = [{"prompt": str(i), "meta": {"gold": {"text": i}}} for i in range(3)]
    path = lines(tmp_path / "n.jsonl", nested)
    found = task(path, answer_key="meta.gold.text", eval_files=[path])
    assert [row["answer"] for row in found.train] == [0, 1, 2]


def test_json_lists_globs_and_folders(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(sums(3)))
    lines(tmp_path / "part-1.jsonl", sums(2))
    lines(tmp_path / "part-2.jsonl", sums(2, 10))
    files = [str(tmp_path / "part-*.jsonl"), str(tmp_path / "a.json")]
    found = task(files, prompt_key="question", eval_files=files[1:])
    assert [row["answer"] for row in found.train] == ["2", "3", "12", "13", "2", "3", "4"]
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet(folder / "train.parquet", sums(7))
    parquet(folder / "test.parquet", sums(2, 50))
    found = dataset(name=str(folder), eval_split="test", prompt_key="question", rewards=[Gsm8k()])
    assert (len(list(found.train)), len(list(found.evaluation))) == (7, 2)


def test_files_are_met_late_and_counted_early(tmp_path):
    path = parquet(tmp_path / "t.parquet", sums(10))
    found = task(path, prompt_key="no such", eval_files=[path], train_limit=4)
    assert (len(found.train), len(found.evaluation)) == (4, 10)  # nothing was read
    assert len(task(lines(tmp_path / "t.jsonl", sums(200))).train) == 198
    (tmp_path / "t.json").write_text(json.dumps(sums(200)))
    listed = task(str(tmp_path / "t.json"), prompt_key="question").train
    assert len(listed) == 0  # not known, as the whole list may be one line
    assert len(list(listed)) == len(listed) == 198
    found = task("~/no/such.parquet", eval_files=["/no.parquet"])
    assert (len(found.train), bool(found.train)) == (0, True)
    with pytest.raises(ValueError, match=r"there is no file '.*/no/such.parquet': bring it here"):
        list(found.train)


# --- conversations ------------------------------------------------------------


def test_system_prompts_and_chat(tmp_path):
    path = lines(tmp_path / "t.jsonl", sums(3))
    user = {"role": "user", "content": "0 + 2 ="}
    system = {"role": "system", "content": "be brief"}
    found = task(path, prompt_key="question", eval_files=[path], chat=True)
    assert found.train[0]["prompt"] == [user]
    found = task(path, prompt_key="question", eval_files=[path], system_prompt="be brief")
    assert found.train[0]["prompt"] == [system, user]
    talks = lines(tmp_path / "c.jsonl", [{"prompt": [user], "answer": "2"}] * 2)
    found = task(talks, eval_files=[talks], system_prompt="be brief")
    assert found.train[0]["prompt"] == [system, user]
    both = lines(tmp_path / "d.jsonl", [{"prompt": [system, user], "answer": "2"}] * 2)
    with pytest.raises(ValueError, match=r"row 0 of .* has a message of the system already"):
        task(both, eval_files=[both], system_prompt="x").check()


# --- long prompts -------------------------------------------------------------


def long_ones(path, words=8):
    texts = ["1 + 2 =", " ".join(map(str, range(words))), "3 + 4 =", "", None]
    return lines(path, [{"prompt": text, "answer": "x"} for text in texts])


def test_long_and_empty_prompts_are_dropped_and_counted(tmp_path, model):
    path = long_ones(tmp_path / "t.jsonl")
    found = task(path, eval_files=[path], tokenizer=model["plain"], max_prompt_length=4)
    assert [row["prompt"] for row in found.train] == ["1 + 2 =", "3 + 4 ="]
    report = found.check()
    assert report["train"] == {
        "rows": 5, "empty": 2, "too_long": 1, "cut": 0, "kept": 2, "share_dropped": 0.6,
        "longest": 8,
    }  # fmt: skip
    assert report["evaluated_and_trained"] == 2


def test_the_template_counts(tmp_path, model):
    path = lines(tmp_path / "t.jsonl", sums(3))
    settings = {"prompt_key": "question", "eval_files": [path], "tokenizer": model["chat"]}
    found = task(path, **settings, max_prompt_length=5, chat=True)
    assert found.check()["train"]["longest"] == 5  # four words and the role
    found = task(path, **settings, max_prompt_length=5, system_prompt="be brief")
    with pytest.raises(ValueError, match=r"no row of .* is left of 3: 0 .*, 3 longer than max"):
        found.check()


def test_long_prompts_are_cut_at_the_beginning(tmp_path, model):
    path = long_ones(tmp_path / "t.jsonl")
    found = task(path, eval_files=[path], tokenizer=model["plain"], max_prompt_length=4,
                 overlong_prompts="cut")  # fmt: skip
    assert [row["prompt"] for row in found.train] == ["1 + 2 =", "4 5 6 7", "3 + 4 ="]
    assert found.check()["train"] | {"kept": 3, "cut": 1, "too_long": 0} == found.check()["train"]
    found = task(path, eval_files=[path], tokenizer=model["chat"], max_prompt_length=5, chat=True,
                 overlong_prompts="cut")  # fmt: skip
    assert found.train[1]["prompt"] == [{"role": "user", "content": "4 5 6 7"}]
    # The template alone is too long.
    with pytest.raises(ValueError, match="3 longer than max_prompt_length=3"):
        task(path, eval_files=[path], tokenizer=model["chat"], max_prompt_length=3,
             system_prompt="be brief", overlong_prompts="cut").check()  # fmt: skip


def test_long_prompts_are_refused(tmp_path, model):
    path = long_ones(tmp_path / "t.jsonl")
    found = task(path, eval_files=[path], tokenizer=model["plain"], max_prompt_length=4,
                 overlong_prompts="refuse")  # fmt: skip
    with pytest.raises(
        ValueError, match=r"1 of 5 prompts of .* longer than max_prompt_length=4.*row 1, has 8"
    ):
        found.check()


# --- held-out rows ------------------------------------------------------------


def test_held_out_prompts_are_not_trained_on(tmp_path):
    rows = sums(100) * 3
    found = task(lines(tmp_path / "t.jsonl", rows), prompt_key="question", held_out=0.1)
    train = [row["prompt"] for row in found.train]
    held = [row["prompt"] for row in found.evaluation]
    assert (len(train), len(held), len(set(held))) == (270, 10, 10)
    assert not set(train) & set(held)
    report = found.check()
    assert (report["train"]["held_out"], report["evaluated_and_trained"]) == (30, 0)
    # Whatever the order of the rows.
    again = task(lines(tmp_path / "u.jsonl", rows[::-1]), prompt_key="question", held_out=0.1)
    assert {row["prompt"] for row in again.evaluation} == set(held)
    few = task(lines(tmp_path / "f.jsonl", sums(3)), prompt_key="question", eval_limit=5)
    assert (len(list(few.train)), len(list(few.evaluation))) == (2, 1)
    with pytest.raises(ValueError, match="one prompt cannot be both held out and trained on"):
        task(lines(tmp_path / "o.jsonl", sums(1) * 5), prompt_key="question").check()


# --- rewards ------------------------------------------------------------------


def test_rewards_are_isolated_where_they_may_hang(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    path = lines(tmp_path / "t.jsonl", sums(3))
    given = [TextFormat(tags=("a",)), Length(limit=8, cache=2), "mine:score"]
    found = task(path, prompt_key="question", rewards=given, reward_timeout=5.0)
    form, _, mine = found.rewards
    assert [type(reward).__name__ for reward in found.rewards] == [
        "IsolatedSync", "Length", "IsolatedSync"]  # fmt: skip
    assert (form.timeout, mine.__name__) == (5.0, "score")
    assert found.extract is None
    plain = task(path, rewards=given, reward_timeout=None).rewards
    assert [type(reward).__name__ for reward in plain] == ["TextFormat", "Length", "function"]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([lambda completions, gold, **_: [1.0]],
         r"'<lambda>' cannot be called: missing a required argument: 'gold'; .* columns answer"),
        ([lambda completions: [1.0]], "cannot be called: got an unexpected keyword argument"),
        (None, "the rows have no column 'data_source', by which a reward could be chosen"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_work_with_the_rows(tmp_path, rewards, message):
    path = lines(tmp_path / "t.jsonl", sums(3))
    found = task(path, prompt_key="question", rewards=rewards)
    with pytest.raises(ValueError, match=message):
        found.check()


def test_unknown_sources_ask_for_a_reward(tmp_path):
    path = lines(tmp_path / "t.jsonl", [{"prompt": str(i), "answer": "a", "data_source": "mine"}
                                        for i in range(3)])  # fmt: skip
    with pytest.raises(ValueError, match=r"no built-in reward for data_source 'mine'.*FromFile"):
        task(path, rewards=None).check()


def test_only_newlines_end_a_line_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"prompt": f"{i}\u2028\x85 =", "answer": str(i)} for i in range(3)]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert sorted(task(str(path), eval_files=[str(path)]).train.dataset["prompt"][:]) == [
        row["prompt"] for row in rows
    ]


# --- bad input ----------------------------------------------------------------


def test_texts_and_conversations_do_not_mix(tmp_path):
    plain = lines(tmp_path / "a.jsonl", sums(3))
    talks = [{"question": [{"role": "user", "content": "1 ="}], "answer": "1"}]
    found = task(plain, eval_files=[lines(tmp_path / "b.jsonl", talks)], prompt_key="question")
    with pytest.raises(ValueError, match="to train on are texts, and those for evaluation conv"):
        found.check()


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ('{"a": 1}\n{"a"', {}, "cannot read .*t.jsonl: line 2 is not JSON"),
        ("1\n2", {}, "line 1 is not an object with columns, but '1'"),
        ('{"a": 1}\n{"a": "x"}', {}, "the column 'a' mixes types"),
        ('{"a": 1, "b": 2}', {}, "has no column 'prompt', it has a, b: set prompt_key"),
        ('{"prompt": "a", "b": 2}', {"answer_key": "c.d"}, "no column 'c.d', it has b, prompt: "),
        ('{"prompt": 7}', {}, "'prompt' of .* holds int64, expected texts, or conversations"),
        ('{"prompt": ["a"]}', {}, "holds list<.*string>, expected texts, or conversations"),
        ('{"prompt": "a", "prompts": 1}', {}, "the column 'prompts', and TRL gives rewards some"),
        ('{"prompt": "a", "completion_ids": 1}', {}, "column 'completion_ids', and TRL gives rew"),
        ('{"prompt": "a", "environments": 1}', {}, "the column 'environments', and TRL gives rew"),
        ("", {}, "has no rows"),
        ('{"prompt": ""}', {}, "no row of .* is left of 1: 1 without a prompt or an answer"),
        ('{"prompt": " \\n\\t"}', {}, "no row of .* is left of 1: 1 without a prompt or an answer"),
        ('{"prompt": " "}', {"chat": True}, "no row of .* is left of 1: 1 without a prompt or"),
        ('{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": " "}]}', {},
         "no row of .* is left of 1: 1 without a prompt or an answer"),
        ('{"prompt": "a", "answer": null}', {}, "1 without a prompt or an answer"),
    ],
)  # fmt: skip
def test_bad_rows_are_one_sentence(tmp_path, content, settings, message):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        task(str(path), **settings).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_files": None}, "give train_files, or the name of a dataset on the hub, and not"),
        ({"name": "x"}, "give train_files, or the name of a dataset on the hub, and not both"),
        ({"held_out": 1.0}, r"held_out must be in \(0, 1\), got 1.0"),
        ({"train_limit": 0}, "train_limit must be at least 1, got 0"),
        ({"eval_split": "test"}, "eval_split goes with the name of a dataset, not with files"),
        ({"max_prompt_length": 5}, "max_prompt_length is in tokens: name the folder or hub name"),
        ({"max_prompt_length": 0, "tokenizer": "x"}, "max_prompt_length must be at least 1, got 0"),
        ({"rewards": ["mine"]}, "cannot import the reward 'mine'.*write module:function"),
        ({"rewards": ["os:nope"]}, "cannot import the reward 'os:nope'"),
        ({"rewards": ["os:sep"]}, "the reward 'os:sep' is not a function, but '/'"),
        ({"reward_timeout": 0.0}, "timeout must be a positive number of seconds, got 0.0"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        dataset(**{"train_files": ["/t.parquet"], "rewards": [Gsm8k()], **settings})


def test_files_that_cannot_be_read(tmp_path, model):
    broken = tmp_path / "t.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"cannot read .*t.parquet: "):
        task(str(broken)).check()
    with pytest.raises(ValueError, match=r"expected a file .parquet, .json or .jsonl"):
        task(str(broken.rename(tmp_path / "t.xlsx")), eval_files=["/x"]).check()
    one = parquet(tmp_path / "a.parquet", [{"prompt": "a", "answer": 1}])
    two = parquet(tmp_path / "b.parquet", [{"prompt": "a", "answer": "x"}])
    with pytest.raises(ValueError, match=r"the columns of .* do not fit together: .*answer"):
        task([one, two]).check()
    path = lines(tmp_path / "t.jsonl", sums(3))
    settings = {"prompt_key": "question", "max_prompt_length": 9}
    with pytest.raises(ValueError, match="cannot load the tokenizer '/none'"):
        task(path, **settings, tokenizer="/none").check()
    with pytest.raises(ValueError, match=r"'.*' has no chat template, and the prompts are conv"):
        task(path, **settings, tokenizer=model["plain"], chat=True).check()


def test_a_dataset_that_cannot_be_reached(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'no/such' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"cannot load the dataset 'no/such' \(config main, split"):
        dataset(name="no/such", config="main", rewards=[Gsm8k()]).check()


def test_math_rewards_take_the_final_answer_from_the_box():
    pytest.importorskip("math_verify")
    assert task("/t.parquet", rewards=[MathVerify()]).final_answer(r"\boxed{7} x") == "7"
