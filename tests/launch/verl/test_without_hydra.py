import sys

from polopt.launch.cli import main
from polopt.launch.verl import overrides


def test_the_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split(".")[0] == "hydra"] + ["hydra"]:
        monkeypatch.setitem(sys.modules, name, None)
    overrides._parser.cache_clear()
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=2\n")
    assert main(["import-verl", str(script)]) == 2
    assert "pip install 'polopt[verl]'" in capsys.readouterr().err
    overrides._parser.cache_clear()
