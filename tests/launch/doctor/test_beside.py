"""Settings that lie beside a log."""

import json
import pickle
import zipfile

import pytest

from polopt.launch.doctor.beside import lost_overrides, sb3_settings
from polopt.launch.doctor.diagnose import diagnose
from polopt.launch.doctor.readers import read

TABLE = "time/total_timesteps,rollout/ep_rew_mean,train/approx_kl\n" + "".join(
    f"{i * 256},{i}.5,0.01\n" for i in range(1, 30)
)


def model(folder, **data):
    with zipfile.ZipFile(folder / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps({"n_envs": 4, **data}))
    (folder / "progress.csv").write_text(TABLE)


def test_a_saved_model_tells_the_settings(tmp_path):
    model(tmp_path, gamma=0.3, n_steps=128, ent_coef=0.0, policy_class={":serialized:": "gASV"})
    (found,) = read(tmp_path)
    assert found.settings["gamma"] == 0.3
    assert found.settings["batch"] == 512
    assert diagnose(found)[0].id == "range-gamma"


def test_numbers_of_off_policy_models_are_not_those_of_ppo(tmp_path):
    model(tmp_path, buffer_size=1_000_000, n_steps=1, ent_coef=0.2, learning_starts=100)
    (found,) = read(tmp_path)
    assert found.settings["buffer_size"] == 1_000_000
    assert not {"batch", "entropy_coef"} & found.settings.keys()


def test_other_archives_are_passed_over(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 cut off")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("data", b"\x80\x04not json")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("other", "{}")
    for name, method in (("d", zipfile.ZIP_DEFLATED), ("e", zipfile.ZIP_LZMA)):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", method) as archive:
            archive.writestr("data", json.dumps(list(range(2000))))
        whole = (tmp_path / f"{name}.zip").read_bytes()
        (tmp_path / f"{name}.zip").write_bytes(whole[:60] + b"\xff" * 300 + whole[360:])
    assert sb3_settings(tmp_path) is None
    model(tmp_path, gamma=0.9)
    assert sb3_settings(tmp_path) == {"n_envs": 4, "gamma": 0.9}


def test_nothing_in_a_model_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", pickle.dumps(Trap()))
    assert sb3_settings(tmp_path) is None
    assert not (tmp_path / "owned").exists()


def test_a_model_of_stable_baselines3(tmp_path):
    library = pytest.importorskip("stable_baselines3")
    library.PPO("MlpPolicy", "CartPole-v1", n_steps=64, vf_coef=0.7).save(tmp_path / "m.zip")
    found = sb3_settings(tmp_path)
    assert (found["n_steps"], found["vf_coef"], found["gae_lambda"]) == (64, 0.7, 0.95)


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["train", "cartpole-ppo", "a.b=1", "a.c=2"], []),
        (["a.b=1", "a.b=1"], []),
        (["a.b=1", "+a.b=2"], ["a.b=1 has no effect, a.b=2 comes after it"]),
        (["a.b=1", "a={c: 2}"], ["a.b=1 has no effect, a={c: 2} comes after it"]),
        (["a={c: 2}", "a.b=1"], []),
    ],
)
def test_overrides_without_effect(words, lost):
    assert [m.text for m in lost_overrides(words)] == lost


def test_overrides_of_verl_that_a_later_one_replaces(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("algorithm: {gamma: 1.0}\n")
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        "- algorithm.gamma=0.9\n- algorithm.gamma=1.0\n"
    )
    line = "step:{} - actor/entropy:0.5 - critic/score/mean:0.{}\n"
    (tmp_path / "train.log").write_text("".join(line.format(i, i) for i in range(10, 30)))
    (found,) = read(tmp_path / "train.log")
    assert found.settings["gamma"] == 1.0
    assert [f.id for f in diagnose(found)] == ["override-lost"]


def test_overrides_of_a_recipe(here, capfd):
    from polopt.launch.cli import main

    words = ["fake.yaml", "collector.total_frames=5", "collector.total_frames=9"]
    assert main(["doctor", *words]) == 1
    out = capfd.readouterr().out
    assert "a setting of the command line has no effect [override-lost; confidence high]" in out
    assert "collector.total_frames=5 has no effect" in out
    assert main(["train", *words, "--json"]) == 0
