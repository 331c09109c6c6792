"""Isolated rewards: what fails costs its sample, is counted, and leaves the rest alone."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("cloudpickle")

from polopt.envs.contract import RewardError
from polopt.envs.isolation import isolated


def make():
    # A closure: pytest imports this file under a name that other processes do not find.
    def moody(completions, bonus=None, **_):
        """Score lengths; some completions are bad for whoever reads them."""
        scores = []
        for i, text in enumerate(completions):
            if text == "hang":
                re.match(r"(a+)+$", "a" * 40 + "b")  # holds the GIL for hours
            elif text == "sleep":
                time.sleep(60)
            elif text == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif text == "exit":
                os._exit(3)
            elif text == "raise":
                raise KeyError("no such key")
            elif text == "sys.exit":
                raise SystemExit(1)
            elif text == "print":
                print("chatter")
            scores.append(None if text == "none" else len(text) + (bonus[i] if bonus else 0.0))
        return scores

    return moody


moody = make()


@pytest.fixture
def reward():
    """Make an isolated reward, and end its workers with the test."""
    made = []

    def make(function=moody, **settings):
        made.append(isolated(function, **{"timeout": 30.0, "workers": 1, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def workers(reward):
    return [worker.process.pid for worker in reward._workers]


def test_each_failure_costs_its_sample_and_no_other(reward, caplog):
    texts = ["a", "hang", "bb", "segfault", "exit", "raise", "none", "ccc", "sys.exit", "dddd"]
    one = reward(timeout=0.5, workers=2)
    logged = {}
    with caplog.at_level(logging.WARNING):
        scores = one(
            prompts=["p"] * 10,
            completions=texts,
            completion_ids=[[1]] * 10,
            bonus=[0.5] * 10,
            log_metric=logged.__setitem__,
            trainer_state=threading.Lock(),  # cannot be pickled, and need not be
        )
    assert scores == [1.5, None, 2.5, None, None, None, None, 3.5, None, 4.5]
    assert one.failures == {"timed_out": 1, "crashed": 2, "raised": 2}
    assert one.scored == 5
    assert logged == {"rewards/moody/failed": 0.5}
    told = "\n".join(caplog.messages)
    assert "timed out on a sample, which is left out of its group: it took more than 0.5 s" in told
    assert "the worker was killed by SIGSEGV" in told or "the worker exited with status 3" in told
    assert re.search(
        r"raised on a sample.*(KeyError: 'no such key'|SystemExit: 1) \(.*line \d", told
    )
    # Workers were replaced, and serve again.
    assert one(completions=["a", "bb"]) == [1.0, 2.0]


def test_workers_stay_and_keep_order(reward):
    one = reward(workers=2)
    texts = ["x" * (i % 7) for i in range(200)]
    assert one(completions=texts) == [float(i % 7) for i in range(200)]
    first = workers(one)
    assert len(first) == 2
    assert one(completions=texts[:5]) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert workers(one) == first
    assert one(completions=[]) == []
    # One that died between two calls is replaced without losing a sample.
    os.kill(first[0], signal.SIGKILL)
    one._workers[0].process.wait()
    assert one(completions=texts) == [float(i % 7) for i in range(200)]
    assert not one.failures
    one.close()
    assert not workers(one)
    assert one(completions=["ab"]) == [2.0]


def test_chunks_fail_together_and_whole_batches_are_seen_whole(reward):
    one = reward(chunk=2)
    assert one(completions=["a", "bb", "raise", "cc", "d"]) == [1.0, 2.0, None, None, 1.0]
    assert one.failures["raised"] == 2

    def share(completions, **_):
        return [len(c) / sum(map(len, completions)) for c in completions]

    assert reward(share, chunk=None)(completions=["a", "bb", "c"]) == [0.25, 0.5, 0.25]


def test_closures_and_objects_reach_the_workers(reward):
    scale = 3.0
    assert reward(lambda completions, **_: [scale])(completions=["a"]) == [3.0]
    one = reward(functools.partial(moody, bonus=[1.0]))
    assert (one.__name__, one(completions=["a"])) == ("moody", [2.0])
    lock = threading.Lock()
    held = reward(lambda completions, **_: [float(lock.locked())])
    with pytest.raises(RewardError, match=r"cannot be sent to a worker process .*without open"):
        held(completions=["a"])


def test_a_reward_by_name(reward, tmp_path, monkeypatch):
    (tmp_path / "by_name.py").write_text("def f(completions, **_):\n    return [2.0, 3.0]\n")
    monkeypatch.chdir(tmp_path)
    assert reward("by_name:f", chunk=None)(completions=["a", "b"]) == [2.0, 3.0]


def test_a_call_beyond_the_contract_ends_the_run(reward):
    with pytest.raises(RewardError, match="'<lambda>' returned 2 scores, expected a list of 1"):
        reward(lambda **_: [1, 2])(completions=["a"])
    with pytest.raises(RewardError, match=r"gave 'x' \(str\) to completion 0"):
        reward(lambda **_: ["x"])(completions=["a"])


def test_a_reward_that_scores_nothing_ends_the_run(reward):
    one = reward()
    assert one(completions=["raise"] * 10) == [None] * 10  # it may be bad luck
    assert one(completions=["raise"] * 20 + ["a"]) == [None] * 20 + [1.0]  # a hard prompt
    with pytest.raises(
        RewardError,
        match=r"'moody' scored none of the last 16 completions \(16 raised\); .*KeyError: 'no such",
    ):
        one(completions=["raise"] * 16)


def test_a_reward_that_cannot_be_loaded(reward, tmp_path, monkeypatch):
    (tmp_path / "gone.py").write_text("def score(completions, **_):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gone

    one = reward(gone.score)
    (tmp_path / "gone.py").write_text("raise ImportError('no such library')\n")
    with pytest.raises(RewardError, match="cannot load the reward: ImportError: no such library"):
        one(completions=["a"])


class SlowToLoad:
    """Does not get to the end of its own loading."""

    def __call__(self, completions, **_):
        return [0.0] * len(completions)

    def __reduce__(self):
        return time.sleep, (60,)


def test_a_reward_that_never_loads_ends_the_run_whatever_it_is_sent(reward, monkeypatch):
    monkeypatch.setattr("polopt.envs.isolation._START", 1.0)
    made = reward(SlowToLoad())
    began = time.monotonic()
    with pytest.raises(RewardError, match="a worker for the reward 'SlowToLoad' does not start"):
        made(completions=["x" * 2**22])  # more than a pipe holds
    assert time.monotonic() - began < 30


def test_async_rewards_wait_together_and_each_has_its_limit():
    began, running, most = time.monotonic(), 0, 0

    async def judge(completions, **_):
        nonlocal running, most
        (text,) = completions
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep({"hang": 60.0}.get(text, 0.05))
        running -= 1
        if text == "raise":
            raise ValueError("busy")
        return [float(len(text))]

    one = isolated(judge, timeout=0.5)
    assert asyncio.iscoroutinefunction(one.__call__)
    texts = ["a", "hang", "raise", *["bb"] * 20]
    scores = asyncio.run(one(completions=texts, prompts=["p"] * 23, trainer_state=object()))
    assert scores == [1.0, None, None, *[2.0] * 20]
    assert one.failures == {"timed_out": 1, "raised": 1}
    assert most == 23
    assert time.monotonic() - began < 30
    with pytest.raises(RewardError, match=r"'judge' scored none of the last \d+ "):
        asyncio.run(one(completions=["raise"] * 16))


def test_nothing_outlives_its_trainer(tmp_path):
    """A hanging worker, and what it started, end with a trainer that is killed."""
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, subprocess, time\n"
        "from polopt.envs.isolation import isolated\n"
        "def reward(completions, **_):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "isolated(reward, timeout=600.0)(completions=['a'])\n"  # no `if __name__` is needed
    )
    trainer = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    worker = int(trainer.stderr.readline())  # what rewards print goes to stderr
    os.kill(worker, 0)
    trainer.kill()
    trainer.communicate()
    assert ends(worker)


def test_what_a_hanging_reward_has_started_ends_with_it(reward, tmp_path):
    def start(completions, **_):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(json.dumps(child.pid))
        return [float(child.wait())]

    assert reward(start, timeout=1.0)(completions=["a"]) == [None]
    pid = json.loads((tmp_path / "pid").read_text())
    assert ends(pid)


def ends(pid):
    """Wait for the end of a process; in a container nobody may reap it."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0.0}, "timeout must be a positive number of seconds, got 0.0"),
        ({"timeout": float("inf")}, "timeout must be a positive number of seconds, got inf"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"function": "a-reward-model"}, "cannot import the reward 'a-reward-model'"),
        ({"function": 7}, "takes a reward function, got int"),
    ],
)
def test_settings_out_of_range(reward, settings, message):
    with pytest.raises(ValueError, match=message):
        reward(**settings)
