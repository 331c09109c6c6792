"""Values: Hydra's grammar, the loss settings, and what is refused with one sentence."""

import pytest

from polopt.launch.job import loss_names
from polopt.launch.recipe import build
from polopt.launch.verl.importer import import_script
from polopt.launch.verl.launches import read_launch
from polopt.losses import Clip, Reject, RejectDivergent, Reweight

M = "python3 -m verl.trainer.main_ppo"
LAUNCH = f"{M} algorithm.adv_estimator=grpo trainer.n_gpus_per_node=1 "
ACTOR = "actor_rollout_ref.actor."


def recipe(words):
    return import_script(LAUNCH + words).recipe


def algorithm(words):
    return build(recipe(words)["algorithm"], loss_names(), "algorithm")


# --- Hydra --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("2E-6", 2e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("-1", -1),
        ("inf", float("inf")),
        ("true", True),
        ("FALSE", False),
        ("on", "on"),
        ("yes", "yes"),
        ("null", None),
        ("a b", "a b"),
        ("[1,2,[x]]", [1, 2, ["x"]]),
        ("['a','b']", ["a", "b"]),
        ("{a:1,b:{c:[x,y]}}", {"a": 1, "b": {"c": ["x", "y"]}}),
        ("'1e-6'", "1e-6"),
        ('"x=1"', "x=1"),
        ("a\\,b", "a,b"),
        ("hdfs://h/p", "hdfs://h/p"),
        ("", ""),
        ("${a.b}", "${a.b}"),
        ("0.5_5.0", "0.5_5.0"),
    ],
)
def test_hydra_values(text, value):
    quoted = "'" + text.replace("'", "'\\''") + "'"
    item = read_launch(f"{M} trainer.nnodes=1 +trainer.x={quoted}").overrides[1]
    assert item.value == value
    assert type(item.value) is type(value)
    assert not item.traps


@pytest.mark.parametrize("text", ["~/x", "a=b", "[1,2", "{'a':1}", "a:b}", "(x"])
def test_what_hydra_refuses_is_reported(text):
    quoted = "'" + text.replace("'", "'\\''") + "'"
    item = read_launch(f"{M} trainer.nnodes=1 +trainer.x={quoted}").overrides[1]
    assert item.value == text
    assert "Hydra cannot read" in item.traps[0]


def test_sweeps_are_reported():
    item = read_launch(f"{M} data.seed=1,2,3").overrides[0]
    assert "multirun" in item.traps[0]


def test_interpolations_are_followed():
    words = f"data.train_batch_size=96 '{ACTOR}ppo_mini_batch_size=${{data.train_batch_size}}'"
    assert recipe(words)["trainer"]["gradient_accumulation_steps"] == 96


# --- loss ---------------------------------------------------------------------


def test_verl_defaults():
    found = algorithm("actor_rollout_ref.rollout.n=4")
    objective = found.objective
    assert objective.surrogate == Clip(low=0.2, high=0.2, dual=3.0)
    assert (objective.ratio, objective.aggregation) == ("token", "token_mean")
    assert (objective.kl_coef, objective.corrections) == (0.0, ())
    assert found.advantage.settings["scale"] == "group"
    assert found.sampling.refill is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")],
)
def test_kl_types(kind, expected):
    words = f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.02 {ACTOR}kl_loss_type={kind}"
    objective = algorithm(words).objective
    assert (objective.kl, objective.kl_coef, objective.kl_in) == (expected, 0.02, "loss")
    assert not objective.kl_reweighted


def test_kl_in_the_reward():
    words = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_penalty=kl"
    objective = algorithm(words).objective
    assert (objective.kl, objective.kl_coef, objective.kl_in) == ("k1", 0.01, "reward")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-mean", "sequence_mean"),
        ("seq-mean-token-sum", "sequence_sum"),
        ("seq-mean-token-sum-norm", "constant"),
    ],
)
def test_aggregations(mode, expected):
    objective = algorithm(f"{ACTOR}loss_agg_mode={mode} data.max_response_length=300").objective
    assert objective.aggregation == expected
    assert objective.horizon == (300 if expected == "constant" else None)


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        ("grpo", "group_advantage"),
        ("rloo", "group_advantage"),
        ("grpo_passk", "pass_at_k_advantage"),
        ("gdpo", "gdpo_advantage"),
        ("gpg", "gpg_advantage"),
        ("opo", "opo_advantage"),
        ("remax", "remax_advantage"),
        ("reinforce_plus_plus", "reinforce_pp_advantage"),
        ("reinforce_plus_plus_baseline", "group_advantage"),
        ("gae", "gae"),
    ],
)
def test_estimators(estimator, name):
    found = algorithm(f"algorithm.adv_estimator={estimator}")
    assert found.advantage.estimate.__name__ == name
    assert found.objective.aggregation == "token_mean"  # verl's default, whatever the paper says
    assert (found.value is not None) == (estimator == "gae")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rollout_is=token", Reweight(level="token", high=2.0)),
        ("rollout_is=sequence,rollout_is_threshold=5", Reweight(level="sequence", high=5.0)),
        (
            "rollout_is=token,rollout_is_threshold=0.5_2.0",
            Reject(level="token", low=0.5, high=2.0),
        ),
        (
            "rollout_rs=seq_mean_k1,rollout_rs_threshold=0.5_5.0",
            Reject(level="geometric", low=0.2, high=2.0, weigh=False),
        ),
        (
            "rollout_rs=token_k1,rollout_rs_threshold=2",
            Reject(level="token", low=0.5, high=2.0, weigh=False),
        ),
        (
            "rollout_rs=seq_max_k3,rollout_rs_threshold=0.1",
            RejectDivergent(limit=0.1, kl="k3", pool="max"),
        ),
    ],
)
def test_corrections(words, expected):
    keys = " ".join(f"algorithm.rollout_correction.{w}" for w in words.split(","))
    assert algorithm(keys).objective.corrections == (expected,)


@pytest.mark.parametrize(
    ("words", "cache", "rewards", "weights"),
    [
        ("", 10, 1, None),
        ("reward_model.overlong_buffer.penalty_factor=0.5", None, 2, [1.0, 0.5]),
        ("+reward.reward_kwargs.max_resp_len=90", None, 2, [1.0, 1.0]),
    ],
)
def test_overlong_buffer(words, cache, rewards, weights):
    buffer = "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=10 "
    found = recipe(f"data.max_response_length=100 {buffer}{words}")
    assert found["algorithm"]["sampling"].get("overlong_cache") == cache
    assert len(found["task"]["rewards"]) == rewards
    assert found["trainer"].get("reward_weights") == weights


# --- sizes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),  # per device, accumulation, steps per generation
    [
        ("trainer.n_gpus_per_node=8", (8, 4, 4)),
        ("trainer.n_gpus_per_node=4 trainer.nnodes=2", (8, 4, 4)),
        (f"{ACTOR}ulysses_sequence_parallel_size=4 trainer.n_gpus_per_node=8", (2, 16, 16)),
        (f"{ACTOR}ulysses_sequence_parallel_size=16 trainer.n_gpus_per_node=16", (1, 16, 16)),
        (f"{ACTOR}ppo_micro_batch_size_per_gpu=7 trainer.n_gpus_per_node=8", (4, 8, 8)),
        (f"{ACTOR}ppo_mini_batch_size=16 trainer.n_gpus_per_node=8", (8, 1, 4)),
        (f"{ACTOR}ppo_epochs=3 trainer.n_gpus_per_node=8", (8, 4, 4)),
        (
            f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=4096 "
            "data.max_prompt_length=256 data.max_response_length=768 trainer.n_gpus_per_node=8",
            (4, 8, 8),
        ),
    ],
)
def test_batches(words, expected):
    base = (
        f"data.train_batch_size=64 {ACTOR}ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4 "
        f"{ACTOR}ppo_micro_batch_size_per_gpu=8 "
    )
    trainer = recipe(base + words)["trainer"]
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
    )
    assert tuple(trainer[n] for n in names) == expected


def test_steps_count_passes():
    base = f"data.train_batch_size=64 {ACTOR}ppo_mini_batch_size=16 {ACTOR}ppo_epochs=3 "
    base += f"{ACTOR}ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=2 "
    found = recipe(base + "trainer.save_freq=5 trainer.total_training_steps=7")
    assert found["trainer"]["save_steps"] == 5 * 12
    assert found["trainer"]["max_steps"] == 7 * 12


# --- what is wrong is said in one sentence -------------------------------------


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("", "line 1: no command is started here"),
        ("echo hello\nls\n", "line 1: .*no command is started|no launch of verl"),
        ("import torch\nx = torch.zeros(3)\n", "line 2: unexpected '\\('"),
        ('{"a": 1}', "line 1"),
        ("%PDF-1.4\n\0\n", "line 2: not a shell script: it contains the character '\\\\x00'"),
        (f"{M} trainer.nnodes=2 'a\n", "line 1: unbalanced single quote"),
        (f'true\n{M} trainer.nnodes="2\n', "line 2: unbalanced double quote"),
        (f"{M} trainer.nnodes=$(echo 2\n", "line 1: unbalanced '\\$\\('"),
        (f"{M} trainer.nnodes=${{N\n", "line 1: unbalanced '\\$\\{'"),
        (f"{M} trainer.nnodes=`echo\n", "line 1: unbalanced backtick"),
        ("if true; then\n echo\n", "line 1: this 'if' has no 'fi'"),
        ("for x in 1 2\ndo echo\n", "line 1: this loop has no 'done'"),
        ("cat <<E\nfoo\n", "line 1: the here-document has no closing 'E'"),
        ("A=(1 2\n", "line 1: this array has no '\\)'"),
        ("case a in\n b) echo\n", "line 1: this 'case' has no 'esac'"),
        (f"A=B\nB=C\nC=A\n{M} trainer.nnodes=$((A))\n", "line 4: .* circle: A -> B -> C -> A"),
        ("f() { f; }\nf\n", "line 1: the function f calls itself without end"),
        ("while true; do echo; done\n", "line 1: the loop takes more than 200 rounds"),
        (f"{M} trainer.nnodes=$((1/0))\n", "line 1: division by zero"),
        (f"{M} trainer.nnodes=$((2**99))\n", "line 1: the exponent 99"),
        (f"{M} trainer.nnodes=$((9223372036854775807+1))\n", "line 1: .* leaves 64-bit"),
        (f"{M} trainer.nnodes=$((1 +))\n", "line 1: unexpected 'the end'"),
        (f"{M} trainer.nnodes=99999999999999\n", "line 1: trainer.nnodes must be between 1 and"),
        (f"{M} trainer.nnodes=0\n", "line 1: trainer.nnodes must be between 1"),
        (f"{M} trainer.nnodes=two\n", "line 1: trainer.nnodes must be a whole number, got 'two'"),
        (f"{M} \\\n trainer.nnodes=$N\n", "line 2: trainer.nnodes needs .* --set N=…"),
        (
            f"N=$(nproc)\n{M} trainer.nnodes=$N trainer.save_freq=`date +%s`\n",
            "--set N=… --set '`date",
        ),
        (
            f"if [ -d /x ]; then O=(a.b=1); else O=(a.b=2); fi\n{M} trainer.nnodes=1 ${{O[@]}}\n",
            "line 2: O depends on the test on line 1, .* --set line1=true",
        ),
        (
            f"{M} 'data.seed=${{trainer.nnodes}}' 'trainer.nnodes=${{data.seed}}'\n",
            "circle: (trainer.nnodes -> data.seed|data.seed -> trainer.nnodes)",
        ),
        (
            "D=${D:-$(probe)}\nL=(python3)\nif [ $D = gpu ]; then L=(uv run python3); fi\n"
            '"${L[@]}" -m verl.trainer.main_ppo trainer.nnodes=1\n',
            "line 4: L depends on the test on line 3, .* supply --set D=…",
        ),
        (
            f"case $(probe) in a) N=1;; *) N=2;; esac\n{M} trainer.nnodes=$N\n",
            r"line 2: trainer.nnodes needs .* supply --set '\$\(probe\)=…'",
        ),
        (f"{M} data.shuffle=maybe\n", "data.shuffle must be true or false"),
        (f"{M} {ACTOR}optim.lr=fast\n", "optim.lr must be a number, got 'fast'"),
        (f"{M} {ACTOR}optim.betas=[0.9]\n", "betas must be a list of two numbers"),
        ("x" * 1_000_001, "line 1: the file has 1000001 characters"),
        ("A=a" + "{1..900}" * 3 + f"\n{M} x{'{1..900}' * 3}\n", "too many words"),
    ],
)
def test_errors(script, message):
    with pytest.raises(ValueError, match=message) as caught:
        import_script(script)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("line")


def test_deep_nesting_is_an_error():
    for script in ("(" * 5000, "$(" * 5000, 'A="${A:-' * 3000, "if true; then " * 3000):
        with pytest.raises(ValueError, match="line 1: "):
            import_script(script)


def test_unused_values_are_remarked():
    launch = read_launch(f"N=3\n{M} trainer.nnodes=$N\n", {"N": "5", "M": "1"})
    text = "\n".join(launch.remarks)
    assert "--set N=5 has no effect: the script assigns it" in text
    assert "--set M=1 has no effect: the script does not read it" in text


def test_further_overrides_win():
    launch = read_launch(f"{M} trainer.nnodes=2\n", {"trainer.nnodes": "4", "+a.b": "1"})
    assert [(o.line, o.key, o.value) for o in launch.overrides] == [
        (1, "trainer.nnodes", 2),
        (0, "trainer.nnodes", 4),
        (0, "a.b", 1),
    ]


def test_a_value_that_is_met_late_is_asked_for():
    words = f"{M} {ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=low_var_kl 'data.seed='$S\n"
    with pytest.raises(ValueError, match=r"line 1: data\.seed .* --set S=…"):
        import_script(words)


@pytest.mark.parametrize(
    ("words", "rows", "expected"),  # max_steps, rollouts in all
    [
        ("trainer.total_epochs=3", "70", (None, 12)),
        ("trainer.total_epochs=3 trainer.total_training_steps=5", "70", (10, 5)),
        ("trainer.total_epochs=3 trainer.total_training_steps=50", "70", (None, 12)),
        ("trainer.total_epochs=3 trainer.total_training_steps=50", None, (100, 50)),
        ("trainer.total_epochs=3", None, (None, None)),
    ],
)
def test_lengths(words, rows, expected):
    base = f"data.train_files=/t.parquet data.train_batch_size=16 {ACTOR}ppo_mini_batch_size=8 "
    base += f"{ACTOR}ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=2 "
    found = import_script(LAUNCH + base + words, {"data.rows": rows} if rows else {})
    facts = {name: value for name, value, _ in found.plan.facts}
    assert (found.recipe["trainer"].get("max_steps"), facts.get("rollouts in all")) == expected
    assert found.recipe["trainer"]["num_train_epochs"] == 3


def test_too_few_rows_are_refused():
    found = import_script(LAUNCH + "data.train_batch_size=64", {"data.rows": "10"})
    assert any("10 training rows do not fill one rollout" in r for r in found.plan.refusals)


def test_clip_ratio_stands_in_for_null():
    found = algorithm(
        f"{ACTOR}clip_ratio=0.1 {ACTOR}clip_ratio_low=null {ACTOR}clip_ratio_high=0.3"
    )
    assert (found.objective.surrogate.low, found.objective.surrogate.high) == (0.1, 0.3)
    words = f"{ACTOR}clip_ratio=0.1 {ACTOR}clip_ratio_low=null"
    assert not any("does nothing" in t for t in import_script(LAUNCH + words).plan.traps)


def test_a_megatron_configuration_is_refused():
    found = import_script(f"{M} --config-name=ppo_megatron_trainer.yaml trainer.nnodes=1\n")
    assert "--config-name=ppo_megatron_trainer.yaml chooses Megatron" in found.plan.refusals[0]


USAGE = 'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nN=$1\nshift\n'
NEEDS = '[ -n "$MODEL" ] || { echo missing; exit 1; }\n'


def test_scripts_that_stop_without_arguments_are_followed_on():
    script = f"{USAGE}{M} trainer.nnodes=$N data.seed=$1\n"
    with pytest.raises(ValueError, match=r"line 4: trainer\.nnodes .* supply --set N=…"):
        import_script(script)
    launch = read_launch(script, {"1": "3", "2": "7"})
    assert [(o.key, o.value) for o in launch.overrides] == [("trainer.nnodes", 3), ("data.seed", 7)]


def test_scripts_that_stop_without_a_variable_are_followed_on():
    launch = read_launch(f"{NEEDS}{M} trainer.nnodes=2 actor_rollout_ref.model.path=$MODEL\n")
    assert [o.asks for o in launch.overrides] == [(), ("MODEL",)]


def test_scripts_inside_of_scripts():
    launch = read_launch(f'srun -n 1 docker exec x bash -lc "A=1 {M} \\\n trainer.nnodes=2"\n')
    assert [(o.key, o.value) for o in launch.overrides] == [("trainer.nnodes", 2)]


def test_names_are_asked_for_in_one_line():
    script = f"{M} trainer.nnodes=$(cat hosts |\n  wc -l)\n"
    with pytest.raises(ValueError, match=r"supply --set '\$\(cat hosts \| wc -l\)=…'$"):
        import_script(script)
    assert read_launch(script, {"$(cat hosts | wc -l)": "3"}).overrides[0].value == 3
