"""Shell as launch scripts use it: one small script per pattern, and what it must give.

Each entry: the script, the overrides that verl gets (key and value, in order), values for
`--set` if it needs them, and a piece of a remark or trap that must be there.
"""

from dataclasses import dataclass, field
from typing import Any

M = "python3 -m verl.trainer.main_ppo"


@dataclass
class Pattern:
    script: str
    expected: list[tuple[str, Any]]
    given: dict[str, str] = field(default_factory=dict)
    remark: str = ""
    bash: bool = True  # whether bash itself gives the same words on any machine


PATTERNS = {
    "continuation": Pattern(
        f"{M} \\\n  data.train_batch_size=96 \\\n  trainer.nnodes=2\n",
        [("data.train_batch_size", 96), ("trainer.nnodes", 2)],
    ),
    "set options": Pattern(f"set -xeuo pipefail\n{M} trainer.nnodes=2\n", [("trainer.nnodes", 2)]),
    "quoted literal": Pattern(
        f"{M} trainer.project_name='demo run'\n", [("trainer.project_name", "demo run")]
    ),
    "odd numbers": Pattern(
        f"{M} actor_rollout_ref.actor.optim.lr=2E-6 algorithm.gamma=1. algorithm.lam=.5 "
        "data.train_batch_size=1_000\n",
        [
            ("actor_rollout_ref.actor.optim.lr", 2e-6),
            ("algorithm.gamma", 1.0),
            ("algorithm.lam", 0.5),
            ("data.train_batch_size", 1000),
        ],
    ),
    "variable in a value": Pattern(
        f'V=/data/v.parquet\nT=/data/t.parquet\n{M} data.val_files="$V" data.train_files=${{T}}\n',
        [("data.val_files", "/data/v.parquet"), ("data.train_files", "/data/t.parquet")],
    ),
    "default": Pattern(
        f"EMPTY=\nLR=${{LR:-3e-7}}\nN=${{EMPTY-5}}\n{M} actor_rollout_ref.actor.optim.lr=$LR "
        "trainer.experiment_name=x$N trainer.nnodes=${EMPTY:-5}\n",
        [
            ("actor_rollout_ref.actor.optim.lr", 3e-7),
            ("trainer.experiment_name", "x"),
            ("trainer.nnodes", 5),
        ],
    ),
    "default that is given": Pattern(
        f"N=${{N:-2}}\n{M} trainer.nnodes=$N\n", [("trainer.nnodes", 7)], {"N": "7"}
    ),
    "all arguments": Pattern(
        f'{M} trainer.nnodes=1 "$@"\n',
        [("trainer.nnodes", 1), ("trainer.nnodes", 4)],
        {"1": "trainer.nnodes=4"},
    ),
    "no arguments": Pattern(f'{M} trainer.nnodes=1 "$@" $@\n', [("trainer.nnodes", 1)]),
    "a lone dollar": Pattern(f"{M} trainer.nnodes=1 $\n", [("trainer.nnodes", 1)], bash=False),
    "assigned twice": Pattern(
        f"N=${{N:-2}}\nN=${{N:-4}}\n{M} trainer.nnodes=$N\n", [("trainer.nnodes", 2)]
    ),
    "JSON list": Pattern(
        f"""{M} trainer.logger='["console","wandb"]'\n""",
        [("trainer.logger", ["console", "wandb"])],
    ),
    "plus": Pattern(
        f"{M} +actor_rollout_ref.model.override_config.attention_dropout=0.\n",
        [("actor_rollout_ref.model.override_config.attention_dropout", 0.0)],
    ),
    "comment behind an assignment": Pattern(
        "TP=2   # two cards\nNAME=a#b\n"
        f"{M} actor_rollout_ref.rollout.tensor_model_parallel_size=$TP "
        "trainer.experiment_name=$NAME # end\n",
        [
            ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2),
            ("trainer.experiment_name", "a#b"),
        ],
        remark="Hydra cannot read",
    ),
    "export": Pattern(
        f"export HF_HOME=/tmp/h N=3\nexport HF_HOME\n{M} trainer.nnodes=$N\n",
        [("trainer.nnodes", 3)],
    ),
    "nested default": Pattern(
        f'{M} trainer.default_local_dir="${{OUT:-${{ROOT:-/data}}/out}}"\n',
        [("trainer.default_local_dir", "/data/out")],
    ),
    "arithmetic": Pattern(
        f"A=1024\nB=$((A * 2 + 256))\n(( B += 1 ))\nlet C=B%10\n"
        f"{M} data.max_response_length=$((B / 2 - (3 - 1))) trainer.save_freq=$C "
        "trainer.test_freq=$(( A > 1000 ? 5 : 6 )) trainer.nnodes=$((2**3))\n",
        [
            ("data.max_response_length", 1150),
            ("trainer.save_freq", 5),
            ("trainer.test_freq", 5),
            ("trainer.nnodes", 8),
        ],
    ),
    "environment before the command": Pattern(
        f"N=2\nN=9 VLLM_USE_V1=1 {M} trainer.nnodes=$N\n", [("trainer.nnodes", 2)]
    ),
    "array": Pattern(
        "Z=/data/v.parquet\nO=(data.train_files=/t.parquet  # the data\n\n"
        f'  data.val_files="$Z"\n)\n{M} "${{O[@]}}" trainer.nnodes=1\n',
        [
            ("data.train_files", "/t.parquet"),
            ("data.val_files", "/data/v.parquet"),
            ("trainer.nnodes", 1),
        ],
    ),
    "array append": Pattern(
        "O=(trainer.nnodes=1)\nO+=(trainer.save_freq=-1)\n"
        "if [ 1 -eq 1 ]; then O+=(data.seed=3); fi\n"
        f'{M} "${{O[@]}}" trainer.test_freq=${{#O[@]}} trainer.experiment_name="${{O[0]%%=*}}"\n',
        [
            ("trainer.nnodes", 1),
            ("trainer.save_freq", -1),
            ("data.seed", 3),
            ("trainer.test_freq", 3),
            ("trainer.experiment_name", "trainer.nnodes"),
        ],
    ),
    "quoted list with variables": Pattern(
        f"A=/a.parquet\nB=/b.parquet\n{M} data.train_files=\"['$A','$B']\"\n",
        [("data.train_files", ["/a.parquet", "/b.parquet"])],
    ),
    "working directory": Pattern(
        f"P=$(pwd)/out\n{M} trainer.default_local_dir=$P trainer.rollout_data_dir=$PWD/r\n",
        [("trainer.default_local_dir", "./out"), ("trainer.rollout_data_dir", "./r")],
        bash=False,
    ),
    "list that loses its quotes": Pattern(
        f"{M} trainer.logger=['console','wandb']\n", [("trainer.logger", ["console", "wandb"])]
    ),
    "substitution that is given": Pattern(
        f'IP=$(hostname -I | awk "{{print \\$1}}")\n{M} trainer.experiment_name=$IP '
        "trainer.nnodes=$(cat hosts | wc -l)\n",
        [("trainer.experiment_name", "10.0.0.1"), ("trainer.nnodes", 3)],
        {"IP": "10.0.0.1", "$(cat hosts | wc -l)": "3"},
        bash=False,
    ),
    "configuration options": Pattern(
        f"{M} --config-path=./cfg --config-name demo_trainer trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        remark="brings defaults of its own",
        bash=False,
    ),
    "if": Pattern(
        "MODE=big\n"
        'if [ "$MODE" = big ]; then N=8; elif [[ $MODE == sm* ]]; then N=2; else N=1; fi\n'
        'if [[ -z "$UNSET" && ! $MODE =~ "mall" ]]; then G=4; fi\n'
        'if [ "$UNSET" = yes ]; then N=99; fi\n'
        f"{M} trainer.nnodes=$N actor_rollout_ref.rollout.n=$G\n",
        [("trainer.nnodes", 8), ("actor_rollout_ref.rollout.n", 4)],
        remark="UNSET is not set",
    ),
    "if on a file, both ways alike": Pattern(
        f"if [ -f /no/such/file ]; then echo a; N=2; else N=2; fi\n{M} trainer.nnodes=$N\n",
        [("trainer.nnodes", 2)],
    ),
    "if on a file, answered": Pattern(
        f"if [ -f /no/such/file ]; then N=2; else N=3; fi\n{M} trainer.nnodes=$N\n",
        [("trainer.nnodes", 2)],
        {"line1": "true"},
        bash=False,
    ),
    "check that exits": Pattern(
        'if [ ! -d "/nowhere" ]; then echo missing; exit 1; fi\n[ -e x ] || exit 1\n'
        f"{M} trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        bash=False,
    ),
    "no newline at the end": Pattern(f"{M} trainer.total_epochs=3", [("trainer.total_epochs", 3)]),
    "same key twice": Pattern(
        f"{M} trainer.nnodes=4 \\\n trainer.nnodes=8\n",
        [("trainer.nnodes", 4), ("trainer.nnodes", 8)],
        remark="is set twice, on lines 1 and 2",
    ),
    "entry of one's own": Pattern(
        "python3 -m recipe.foo.main_foo trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        remark="is not verl.trainer.main_ppo",
        bash=False,
    ),
    "pipe to tee": Pattern(
        f"{M} trainer.nnodes=2 2>&1 | tee log_$(date +%F).txt\n",
        [("trainer.nnodes", 2)],
        bash=False,
    ),
    "further arguments": Pattern(
        f'{M} data.seed=$1 "${{@:2}}"\n',
        [("data.seed", 4), ("trainer.nnodes", 2)],
        {"1": "4", "2": "trainer.nnodes=2"},
    ),
    "positional": Pattern(
        f'N=$1\nshift\nK=${{1:-6}}\n{M} trainer.nnodes=$N data.seed=$K "$@"\n',
        [("trainer.nnodes", 4), ("data.seed", 6)],
        {"1": "4"},
    ),
    "configuration group": Pattern(
        f"{M} model_engine=dp trainer.nnodes=2\n", [("model_engine", "dp"), ("trainer.nnodes", 2)]
    ),
    "date in a name": Pattern(
        f"{M} trainer.experiment_name=run_$(date +%m%d)\n",
        [("trainer.experiment_name", "run_$(date +%m%d)")],
        bash=False,
    ),
    "ray job submit": Pattern(
        "ray job submit --address=http://127.0.0.1:8265 --runtime-env e.yaml --no-wait -- python3 "
        "-m verl.trainer.main_ppo trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        bash=False,
    ),
    "torchrun": Pattern(
        "torchrun --standalone --nnodes=1 --nproc_per_node 8 -m verl.trainer.main_ppo "
        "trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        bash=False,
    ),
    "python file": Pattern(
        "python -u scripts/train_verl.py trainer.nnodes=2\n", [("trainer.nnodes", 2)], bash=False
    ),
    "backticks": Pattern(
        f"D=`date +%s`\n{M} trainer.experiment_name=a_$D\n",
        [("trainer.experiment_name", "a_`date +%s`")],
        bash=False,
    ),
    "case": Pattern(
        'SIZE=m\ncase "$SIZE" in\n  s|xs) N=1 ;;\n  [m-n]*) N=2;;\n  *) echo no; exit 1;;\nesac\n'
        f"{M} trainer.nnodes=$N\n",
        [("trainer.nnodes", 2)],
    ),
    "booleans": Pattern(
        f"{M} data.shuffle=true trainer.val_before_train=False data.truncation=on\n",
        [("data.shuffle", True), ("trainer.val_before_train", False), ("data.truncation", "on")],
    ),
    "bare list": Pattern(
        f"{M} trainer.logger=[console,tensorboard]\n",
        [("trainer.logger", ["console", "tensorboard"])],
    ),
    "overrides in comments": Pattern(
        f"# trainer.nnodes=9 \\\n{M} trainer.nnodes=2\n# data.seed=1\n", [("trainer.nnodes", 2)]
    ),
    "comment inside a continued command": Pattern(
        f"{M} trainer.nnodes=2 \\\n  # data.seed=1 \\\n  trainer.save_freq=5\n",
        [("trainer.nnodes", 2)],
        remark="trainer.save_freq never reaches verl",
    ),
    "blank line inside a continued command": Pattern(
        f"{M} trainer.nnodes=2 \\\n\n  trainer.save_freq=5\n",
        [("trainer.nnodes", 2)],
        remark="trainer.save_freq never reaches verl",
    ),
    "several calls": Pattern(
        "python3 prep.py --out x\n"
        f"{M} trainer.nnodes=2 data.seed=1\npython3 -m verl.trainer.main_eval data.path=x\n",
        [("trainer.nnodes", 2), ("data.seed", 1)],
        remark="another launch, verl.trainer.main_eval",
        bash=False,
    ),
    "plus plus": Pattern(
        f"{M} ++data.seed=3 ++trainer.nnodes=2\n", [("data.seed", 3), ("trainer.nnodes", 2)]
    ),
    "override in quotes": Pattern(
        f"""{M} "trainer.project_name='hello world'" 'trainer.nnodes=2'\n""",
        [("trainer.project_name", "hello world"), ("trainer.nnodes", 2)],
    ),
    "pattern expansions": Pattern(
        "P=/a/b/Qwen3-8B.tar.gz\nN=${P##*/}\n"
        f"{M} trainer.project_name=${{N,,}} trainer.experiment_name=${{P%.*}}_${{N^^}}_${{N%%-*}}_"
        "${N//./-}_${N:0:4}_${N#*-}_${N: -2} trainer.default_local_dir=${P/a/z}\n",
        [
            ("trainer.project_name", "qwen3-8b.tar.gz"),
            (
                "trainer.experiment_name",
                "/a/b/Qwen3-8B.tar_QWEN3-8B.TAR.GZ_Qwen3_Qwen3-8B-tar-gz_Qwen_8B.tar.gz_gz",
            ),
            ("trainer.default_local_dir", "/z/b/Qwen3-8B.tar.gz"),
        ],
    ),
    "overrides in a variable": Pattern(
        f'EXTRA="trainer.nnodes=2  data.seed=3"\nEXTRA="$EXTRA trainer.save_freq=4"\n{M} $EXTRA\n',
        [("trainer.nnodes", 2), ("data.seed", 3), ("trainer.save_freq", 4)],
    ),
    "null and None": Pattern(
        f"{M} data.val_files=null trainer.rollout_data_dir=None\n",
        [("data.val_files", None), ("trainer.rollout_data_dir", None)],
        remark="None is the string 'None' in Hydra",
    ),
    "alternative": Pattern(
        f"A=1\n{M} trainer.nnodes=1 ${{A:+trainer.save_freq=2}} ${{B:+trainer.test_freq=2}}\n",
        [("trainer.nnodes", 1), ("trainer.save_freq", 2)],
    ),
    "here-document": Pattern(
        f"cat > /dev/null <<'E'\n a: ${{1}} ' \" (\nE\ncat <<-X > /dev/null\n\tb\n\tX\n"
        f"{M} trainer.nnodes=2\n",
        [("trainer.nnodes", 2)],
        bash=False,
    ),
    "for": Pattern(
        f"for s in 1 2; do {M} data.seed=$s trainer.nnodes=2; done\n",
        [("data.seed", 1), ("trainer.nnodes", 2)],
        remark="round 1 of 2 of the loop on line 1 (s=1)",
        bash=False,
    ),
    "loop that builds an array": Pattern(
        'O=()\nfor f in a b; do O+=("/$f.parquet"); done\nS=\n'
        'for ((i=0; i<2; i++)); do S="$S$i"; done\n'
        "while [ $i -gt 0 ]; do i=$((i - 1)); if [ $i -eq 0 ]; then break; fi; done\n"
        f"{M} data.train_files=\"['${{O[0]}}','${{O[1]}}']\" trainer.experiment_name=s$S "
        "data.seed=$i\n",
        [
            ("data.train_files", ["/a.parquet", "/b.parquet"]),
            ("trainer.experiment_name", "s01"),
            ("data.seed", 0),
        ],
    ),
    "background": Pattern(
        f"nohup {M} trainer.nnodes=2 > o.log 2>&1 &\nwait\n", [("trainer.nnodes", 2)], bash=False
    ),
    "required variable": Pattern(
        f"N=${{N:?set N}}\n{M} trainer.nnodes=$N\n", [("trainer.nnodes", 2)], {"N": "2"}
    ),
    "dictionary": Pattern(
        f"{M} '+actor_rollout_ref.model.override_config={{x:1,y:[2,3],z:{{w:a}}}}'\n",
        [("actor_rollout_ref.model.override_config", {"x": 1, "y": [2, 3], "z": {"w": "a"}})],
    ),
    "brace expansion": Pattern(
        f"{M} data.{{seed,val_batch_size}}=3 trainer.experiment_name=a{{1..2}}\n",
        [
            ("data.seed", 3),
            ("data.val_batch_size", 3),
            ("trainer.experiment_name", "a1"),
            ("trainer.experiment_name", "a2"),
        ],
    ),
    "function": Pattern(
        f'run() {{\n  local n=$1; shift\n  {M} trainer.nnodes=$n "$@"\n}}\n'
        "function noop { return 0; }\nnoop\nrun 2 data.seed=4\n",
        [("trainer.nnodes", 2), ("data.seed", 4)],
    ),
    "source": Pattern(
        f"source ./common.sh\n{M} trainer.nnodes=$NODES\n",
        [("trainer.nnodes", 2)],
        {"NODES": "2"},
        remark="the file './common.sh' is not read",
        bash=False,
    ),
    "ray start": Pattern(
        f"ray start --head --port 6379\n{M} trainer.nnodes=2\n", [("trainer.nnodes", 2)], bash=False
    ),
    "key in a variable": Pattern(
        f"R=actor_rollout_ref.rollout\n{M} ${{R}}.n=2\n", [("actor_rollout_ref.rollout.n", 2)]
    ),
    "hydra keys": Pattern(
        f"{M} hydra.run.dir=/tmp/x trainer.nnodes=2\n",
        [("hydra.run.dir", "/tmp/x"), ("trainer.nnodes", 2)],
    ),
    "empty value": Pattern(f"{M} trainer.project_name=\n", [("trainer.project_name", "")]),
    "uv run": Pattern(f"uv run {M} trainer.nnodes=2\n", [("trainer.nnodes", 2)], bash=False),
    "wrappers": Pattern(
        f"env A=1 B=2 timeout 10h {M} trainer.nnodes=2\n", [("trainer.nnodes", 2)], bash=False
    ),
    "eval and bash -c": Pattern(
        f'CMD="{M} trainer.nnodes=2"\neval "$CMD data.seed=1"\n',
        [("trainer.nnodes", 2), ("data.seed", 1)],
    ),
    "comment behind a backslash": Pattern(
        f"{M} trainer.nnodes=2 \\ # note\n  trainer.save_freq=5\n",
        [("trainer.nnodes", 2)],
        remark="trainer.save_freq never reaches verl",
        bash=False,
    ),
    "value with an equals sign": Pattern(
        f"""{M} trainer.project_name='"x=1"'\n""", [("trainer.project_name", "x=1")]
    ),
    "tilde in a value": Pattern(
        f"{M} actor_rollout_ref.model.path=~/models/x\n",
        [("actor_rollout_ref.model.path", "~/models/x")],
        remark="Hydra cannot read",
        bash=False,
    ),
    "deletion": Pattern(
        f"{M} '~trainer.rollout_data_dir' trainer.nnodes=2\n",
        [("trainer.rollout_data_dir", None), ("trainer.nnodes", 2)],
    ),
    "interpolation": Pattern(
        f"{M} data.train_batch_size=64 "
        "'actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}'\n",
        [
            ("data.train_batch_size", 64),
            ("actor_rollout_ref.actor.ppo_mini_batch_size", "${data.train_batch_size}"),
        ],
    ),
    "CR LF": Pattern(
        f"{M} \\\r\n  trainer.nnodes=2 \\\r\n  data.seed=1\r\n",
        [("trainer.nnodes", 2), ("data.seed", 1)],
        remark="CR LF",
        bash=False,
    ),
    "lost equals signs": Pattern(
        f"{M} \\\n algorithm.adv_estimatorgrpo \\\n data.train_batch_size1024\\\n "
        "trainer.nnodes=2\n",
        [
            ("algorithm.adv_estimator", "grpo"),
            ("data.train_batch_size", 1024),
            ("trainer.nnodes", 2),
        ],
        remark="the copy lost its '='",
        bash=False,
    ),
    "list of overrides": Pattern(
        "# only overrides\ntrainer.nnodes=2\n'data.train_files=/t.parquet'\n+data.seed=1 \\\n",
        [("trainer.nnodes", 2), ("data.train_files", "/t.parquet"), ("data.seed", 1)],
        bash=False,
    ),
}
