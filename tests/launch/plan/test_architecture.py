import json

import pytest

from polopt.launch.plan.architecture import from_config, load, model_names

# Totals that the publishers state, or that transformers counts on their checkpoints.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gemma-3-1b": 999_885_952,
    "smollm3-3b": 3_075_098_624,
}

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters_are_the_published_ones(name, parameters):
    assert load(name).parameters == parameters


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_what_transformers_counts(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from polopt.launch.plan.architecture import _shipped

    config = _shipped()[name] | {"num_hidden_layers": 2, "pad_token_id": None}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    expected = sum(p.numel() for p in model.parameters())
    assert from_config(config, name=name).parameters == expected


@pytest.mark.parametrize("place", ["folder", "file"])
def test_reads_a_folder_or_a_file(tmp_path, place):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = load(str(folder if place == "folder" else folder / "config.json"))
    assert (found.name, found.layers, found.kv_width) == ("mine", 2, 32)


def test_names_of_the_hub_are_understood():
    assert load("Qwen/Qwen2.5-7B-Instruct") == load("qwen2.5-7b")


def test_a_multimodal_config_gives_its_text_model():
    nested = {"model_type": "some_vl", "text_config": CONFIG | {"model_type": "qwen3_text"}}
    found = from_config(nested, name="vl")
    assert (found.model_type, found.hidden, found.qk_norm) == ("qwen3", 64, True)


def test_an_unknown_kind_is_not_called_checked():
    assert from_config(CONFIG, name="x").checked
    assert not from_config(CONFIG | {"model_type": "novel"}, name="x").checked


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, ["mine", "'hidden_size' is missing"]),
        ({"vocab_size": "many"}, ["'vocab_size'", "'many'"]),
        ({"num_hidden_layers": -1}, ["'num_hidden_layers'", "-1"]),
        ({"num_hidden_layers": True}, ["'num_hidden_layers'", "True"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"hidden_size": 10**9}, ["cannot be right", "hidden_size=1000000000"]),
        ({"model_type": None}, ["'model_type' is missing"]),
        ({"model_type": "gpt_neox"}, ["'gpt_neox' has an MLP without a gate", "not planned"]),
        ({"kv_lora_rank": 512}, ["compressed keys and values"]),
        ({"num_experts": 4}, ["'num_experts_per_tok' is missing"]),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
            ["with and without experts"],
        ),
    ],
)
def test_bad_configs_are_one_sentence(change, words):
    with pytest.raises(ValueError, match=r"^config of mine: [^\n]+$") as caught:
        from_config(CONFIG | change, name="mine")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "as JSON"), ("[1]", "must hold a JSON object, got list")],
)
def test_bad_files_are_one_sentence(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        load(str(tmp_path))


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'qwen3-8b'"):
        load("qwen3-9b")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json"):
        load(str(tmp_path))
