"""The doctor beside a run."""

import math
import time

import pytest

from polopt.launch.doctor.live import Attendance, Watch


def test_a_finding_is_told_once_and_after_two_looks():
    watch = Watch({}, "polopt", "control", Attendance(every=10))
    watch._rest = -math.inf
    told = []
    for step in range(60):
        watch._rest = 0.0  # looking is limited to a share of the time, which a test has not
        told += [(step, f.id) for f in watch.log(step, {"return_mean": 1.0, "entropy": 0.5})]
    assert told == [(19, "reward-constant")]
    assert not watch.halted


def test_nan_halts_at_once_where_asked_for():
    watch = Watch({}, "trl", "llm", Attendance(on_fatal="stop"))
    assert watch.log(1, {"loss": 0.5, "grad_norm": 1.0}) == []
    (finding,) = watch.log(2, {"loss": 0.5, "grad_norm": math.nan})
    assert finding.id == "nonfinite"
    assert "max_grad_norm" in finding.remedy
    assert watch.halted


def test_looking_takes_a_small_share_of_the_time():
    watch = Watch({}, "polopt", "control", Attendance(every=1))
    looks = []
    look = watch._look
    watch._look = lambda: looks.append(1) or look()
    for step in range(2000):
        watch.log(step, {"return_mean": float(step), "entropy": 0.5, "kl_approx": 0.01})
    assert 1 <= len(looks) < 200


def test_the_section_is_checked():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Attendance(every=0)


def test_beside_a_trainer_of_torchrl():
    pytest.importorskip("torchrl")
    from polopt.launch.doctor.torchrl import DoctorLogger

    class Logger:
        def __init__(self):
            self.lines = []

        def log_scalar(self, name, value, step=None):
            self.lines.append((name, value, step))

        def log_hparams(self, cfg):
            return "kept"

    class Trainer:
        collected_frames, total_frames = 300, 1000

        def register_op(self, where, op):
            assert where == "post_steps"
            self.op = op

    logger, trainer = Logger(), Trainer()
    doctor = DoctorLogger(logger, on_fatal="stop")
    doctor.register(trainer)
    doctor.log_scalar("grad_norm", 1.0, step=100)
    trainer.op()
    assert trainer.total_frames == 1000
    doctor.log_scalar("grad_norm", math.nan, step=200)
    with pytest.warns(UserWarning, match="nonfinite"):
        trainer.op()
    assert trainer.total_frames == 300
    assert logger.lines == [
        ("grad_norm", 1.0, 100),
        ("grad_norm", pytest.approx(math.nan, nan_ok=True), 200),
    ]
    assert doctor.log_hparams({}) == "kept"


def test_a_loop_of_ones_own_may_ask():
    pytest.importorskip("torchrl")
    from types import SimpleNamespace

    from polopt.launch.doctor.torchrl import DoctorLogger

    for step in (lambda i: i, lambda i: None):  # TorchRL's loggers count for themselves
        logger = SimpleNamespace(log_scalar=lambda *_, **__: None)
        doctor = DoctorLogger(logger, on_fatal="stop")
        for i in range(3):
            doctor.log_scalar("loss_objective", 1.0, step=step(i))
            doctor.log_scalar("grad_norm", 1.0, step=step(i))
        assert not doctor.halted
        assert doctor.watch._lines == 3
        doctor.log_scalar("grad_norm", math.nan, step=step(3))
        with pytest.warns(UserWarning, match="nonfinite"):
            assert doctor.halted


@pytest.mark.slow
def test_a_run_of_torchrl_is_saved_and_ended(tmp_path):
    pytest.importorskip("torchrl")
    from tensordict.nn import TensorDictModule
    from torch import nn, optim
    from torchrl import collectors
    from torchrl.envs import GymEnv
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
    from torchrl.record.loggers import CSVLogger
    from torchrl.trainers import Trainer

    from polopt.launch.doctor.readers import read
    from polopt.launch.doctor.torchrl import DoctorLogger

    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    collector = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    doctor = DoctorLogger(CSVLogger("run", log_dir=str(tmp_path)), on_fatal="stop", every=1)
    trainer = Trainer(
        collector=collector(
            GymEnv("CartPole-v1"), actor, frames_per_batch=100, total_frames=2000
        ),
        total_frames=2000, frame_skip=1, loss_module=loss, optim_steps_per_batch=2,
        optimizer=optim.Adam(loss.parameters(), 1e-3), logger=doctor, log_interval=50,
        progress_bar=False, clip_grad_norm=False, save_trainer_file=tmp_path / "trainer.pt",
    )  # fmt: skip
    batches = []

    def process(batch):
        advantage(batch)
        batches.append(batch.numel())
        if len(batches) == 6:
            batch["value_target"] = batch["value_target"] * math.nan
        return batch.reshape(-1)

    trainer.register_op("batch_process", process)
    doctor.register(trainer)
    with pytest.warns(UserWarning, match="nonfinite"):
        trainer.train()
    assert trainer.collected_frames == 600
    assert (tmp_path / "trainer.pt").exists()
    (log,) = read(tmp_path / "run")
    assert log.framework == "torchrl"


def test_beside_a_trainer_of_transformers():
    pytest.importorskip("trl")
    from types import SimpleNamespace

    from polopt.launch.doctor.callback import DoctorCallback

    callback = DoctorCallback(on_fatal="stop")
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    callback.on_train_begin(SimpleNamespace(learning_rate=1e-6), state, control)
    callback.on_log(None, state, control, logs={"loss": 0.1, "grad_norm": 1.0})
    callback.on_step_end(None, state, control)
    assert not control.should_training_stop
    callback.on_log(None, state, control, logs={"loss": math.inf, "grad_norm": math.nan})
    callback.on_step_end(None, state, control)
    assert control.should_save
    assert control.should_training_stop
    assert list(callback.watch.found) == ["nonfinite"]
    callback = DoctorCallback(every=1)
    callback.on_train_begin(SimpleNamespace(learning_rate=1e-6), state, control)
    callback.on_log(None, state, control, logs={"grad_norm": 1.0, "reward": 0.5})
    callback.on_log(None, state, control, logs={"grad_norm": 1.0, "rewards/a/mean": None})
    assert not callback.watch.found
    callback.watch._rest = 0.0
    callback.on_log(None, state, control, logs={"grad_norm": 1.0, "reward": None})
    assert list(callback.watch.found) == ["reward-nonfinite"]


def plain_trainer(tmp_path, monkeypatch, rewards, **settings):
    """A trainer of TRL, as a script of its own has it."""
    pytest.importorskip("trl")
    pytest.importorskip("reasoning_gym")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from polopt.envs.text import arithmetic
    from polopt.ext.trl.models import TinyQwen3
    from polopt.launch.doctor.callback import DoctorCallback

    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    task = arithmetic(terms=(2, 2), digits=(1, 1), train_size=32, evaluation_size=8)
    source = TinyQwen3(hidden_size=16, warmup_steps=1).make(task)
    args = GRPOConfig(
        str(tmp_path / "out"), per_device_train_batch_size=8, max_completion_length=2,
        logging_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(source),
        [rewards],
        args,
        train_dataset=Dataset.from_list([dict(row) for row in task.train]),
        processing_class=AutoTokenizer.from_pretrained(source, padding_side="left"),
        callbacks=[DoctorCallback(on_fatal="stop", every=8)],
    )


@pytest.mark.slow
def test_a_run_of_trl_without_rewards_is_saved_and_ended(tmp_path, monkeypatch):
    trainer = plain_trainer(
        tmp_path, monkeypatch, lambda completions, **_: [None] * len(completions),
        max_steps=12, save_strategy="no",
    )  # fmt: skip
    from polopt.launch.doctor.diagnose import diagnose
    from polopt.launch.doctor.readers import read

    trainer.train()
    assert trainer.state.global_step < 12
    (log,) = read(tmp_path / "out")  # its checkpoint
    assert log.framework == "trl"
    assert diagnose(log)[0].id == "reward-nonfinite"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_phases_of_a_trainer_of_trl(tmp_path, monkeypatch, checkpointing):
    def slow(completions, **_):
        time.sleep(0.5)
        return [float(len(c)) for c in completions]

    trainer = plain_trainer(
        tmp_path, monkeypatch, slow, max_steps=6, save_steps=6, gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    from polopt.launch.doctor.phases import bottleneck, phase_seconds
    from polopt.launch.doctor.readers import read

    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 6
    for line in lines:
        assert line["time_sample"] > 0.5  # one generation for a step
        # TRL's time of a step has neither the clipping nor the optimizer.
        assert line["time_update"] > 0
        assert line["time_sample"] + line["time_update"] > 0.95 * line["step_time"]
        assert line["time_optimizer"] > 0
    (log,) = read(tmp_path / "out")
    seconds = phase_seconds(log)
    assert list(seconds) == ["sample_time", "loss_time", "optimizer_time"]
    assert seconds["sample_time"] == pytest.approx(sum(x["time_sample"] for x in lines))
    binds = bottleneck(log)
    assert binds.name == "generation and rewards"
    assert "Time the reward by itself" in binds.knob
    embeddings = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
    assert not any(hasattr(h, "__self__") for h in embeddings._forward_pre_hooks.values())
