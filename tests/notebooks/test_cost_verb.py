"""`workbench cost` predicts, from shapes alone, what the models that were really compressed are found to cost."""

import copy

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from compress import apply, load_model, save_compressed
from compress.linear import compressed_linears
from eval.speed.cost import predict
from eval.speed.devices import DATA_SHEETS, ceilings_of
from eval.speed.work import work
from kernels.support.deploy import deployed
from notebooks.batch.cli import main

AT = {"context": 300, "batch": 3}
ARGUMENTS = ["--context", "300", "--batch", "3", "--device", "l4"]


def printed(capsys) -> dict[str, list[str]]:
    """The cells of the table by the name of the row."""
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {name: rest for name, *rest in cells}


def given(*recipes: str) -> list[str]:
    """The options that name recipes."""
    return [part for recipe in recipes for part in ("--recipe", recipe)]


@pytest.fixture
def folder(tiny, tmp_path):
    """Saves a tiny model of an architecture and gives its folder."""

    def save(architecture: str, **settings) -> str:
        model = tiny(architecture, **settings)
        model.save_pretrained(tmp_path / architecture)
        return str(tmp_path / architecture)

    return save


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "gemma3_text", "mixtral"])
def test_predictions_are_those_of_the_compressed_model(architecture, folder, tokens, capsys):
    """Ends that are tied and apart, layers with a window, experts that are fused."""
    place = folder(architecture, tie_word_embeddings=architecture == "gemma3_text")
    recipes = ["rtn(bits=4, group_size=16)", "rtn(bits=3, group_size=16), rtn(bits=8, group_size=32, where=embedding)"]
    assert main(["cost", place, *given(*recipes), *ARGUMENTS]) == 0
    rows, ceilings = printed(capsys), ceilings_of("l4")[0]
    model = AutoModelForCausalLM.from_pretrained(place)
    models = {"16 bits": model} | {text: apply(text, copy.deepcopy(model), tokens(2)).model for text in recipes}
    for name, one in models.items():
        row = predict(name, work(deployed(one)), **AT, ceilings=ceilings)
        weights, cache, _, least, tokens_per_s, bound = rows[name]
        assert weights == f"{row.weight_bytes / 1e6:,.1f} MB" and cache == f"{row.cache_bytes / 1e6:,.1f} MB"
        assert least == f"{row.predicted_s * 1e3:,.3g} ms" and tokens_per_s == f"{3 / row.predicted_s:,.0f}"
        assert bound == "memory"


def test_a_smaller_cache_takes_its_share(capsys):
    half = ["--cache-bits", "8", "--kept", "0.5"]
    assert main(["cost", "smollm2-135m", *given("rtn(bits=8)"), "--context", "8192", "--device", "h200", *half]) == 0
    rows = printed(capsys)
    assert rows["16 bits"][1] == f"{30 * 2 * 3 * 64 * 2 * 8192 / 1e6:,.1f} MB"
    assert rows["rtn(bits=8)"][1] == f"{30 * 2 * 3 * 64 * 2 * 8192 / 4e6:,.1f} MB"


def test_zeros_and_thin_factors_count_as_they_are_stored_and_multiplied(folder, tiny, tokens, capsys):
    place, recipes = folder("llama"), ["wanda(ratio=0.5)", "svd(ratio=0.5)"]
    assert main(["cost", place, *given(*recipes), *ARGUMENTS]) == 0
    rows, model = printed(capsys), tiny("llama")
    for text in recipes:
        made = apply(text, copy.deepcopy(model).bfloat16(), tokens(2)).model
        row = predict(text, work(deployed(made)), **AT, ceilings=ceilings_of("l4")[0])
        assert rows[text][0] == f"{row.weight_bytes / 1e6:,.1f} MB"
        assert row.weight_bytes < predict("", work(deployed(model)), **AT, ceilings=ceilings_of("l4")[0]).weight_bytes
    linears = compressed_linears(made).values()  # of svd
    assert all(linear.macs == linear.parts[0].rank * sum(linear.parts[0].shape) for linear in linears)


def test_the_cache_of_latent_attention(tmp_path, capsys):
    """70.272 kB a token, "Insights into DeepSeek-V3" (arXiv:2505.09343, table 1)."""
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("deepseek_v3", **latent, **experts, **small, **heads)
    config.save_pretrained(tmp_path)
    assert main(["cost", str(tmp_path), "--device", "h100-sxm"]) == 0
    assert "each token adds 70.272 kB to the cache" in capsys.readouterr().out


def test_a_device_by_its_data_sheet():
    ceilings, how = ceilings_of("a100-80gb")
    assert ceilings.memory == pytest.approx(2.039e12) and ceilings.rates == {"bfloat16": 312e12}
    assert how == "its data sheet"
    assert all(0.1 < bandwidth < 10 and 50 < rate < 3000 for bandwidth, rate in DATA_SHEETS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "`--context` (=0) must be 1 or more"),
        (["--batch", "-2"], "`--batch` (=-2) must be 1 or more"),
        (["--device", "h100-sxn"], "`--device` (='h100-sxn') is not known; did you mean h100-sxm? It can be here, "),
        (["--kept", "0.5"], "`--cache-bits` and `--kept` are of the caches of recipes"),
        (["--recipe", "rtn", "--kept", "1.5"], "`--kept` (=1.5) must be a share above 0"),
        (["--recipe", "rtn", "--cache-bits", "32"], "`--cache-bits` (=32) must be above 0, and 16 at most"),
        (
            ["--recipe", "rtn, kv_int"],
            "must do without kv_int(bits=4, group_size=64): the size of a cache is given by --cache-bits",
        ),
        (
            ["--recipe", "layer_drop(count=1), rtn"],
            "must do without layer_drop(target='attention', count=1): what it drops",
        ),
        (["--recipe", "mixed(budget_mb=60, choices='rtn(bits={3, 8})')"], "what it chooses depends on the weights"),
        (["--recipe", "rtn(bits=4, group_size=48)"], "`group_size` (=48)"),
        (["--recipe", "rnt"], "rnt is not a method; did you mean rtn?"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message, capsys):
    assert main(["cost", "tiny", *(["--device", "l4"] if "--device" not in arguments else []), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert main(["cost", str(tmp_path / "nothing"), "--device", "l4"]) == 2
    assert "`MODEL` (=" in capsys.readouterr().err


def test_a_saved_model_is_counted_as_it_is_stored(tmp_path, capsys):
    model, tokenizer = load_model("tiny", dtype="bfloat16")
    made = apply("rtn(bits=4, group_size=16)", model)
    save_compressed(made, tmp_path / "saved", tokenizer)
    assert main(["cost", str(tmp_path / "saved"), *ARGUMENTS]) == 0
    row = predict("saved", work(deployed(made.model)), **AT, ceilings=ceilings_of("l4")[0])
    assert printed(capsys)["as stored"][0] == f"{row.weight_bytes / 1e6:,.1f} MB"
