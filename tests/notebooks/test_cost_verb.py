"""`workbench cost` predicts, from shapes alone, what the models that were really compressed are found to cost."""

import copy
import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from compress import apply, load_model, save_compressed
from compress.kv import attached
from compress.linear import compressed_linears
from compress.recipe import methods_of
from eval.machine.size import size
from eval.speed.cost import Tiers, predict, predict_prompt
from eval.speed.devices import DATA_SHEETS, ceilings_of, link_of
from eval.speed.work import work
from kernels.support.deploy import deployed
from notebooks.batch.cli import main
from notebooks.study import costs

ROOT = Path(__file__).parents[2]
AT = {"context": 300, "batch": 3}
ARGUMENTS = ["--context", "300", "--batch", "3", "--device", "l4"]


def printed(capsys, cache: str = "16 bits") -> dict[str, list[str]]:
    """The cells of the table by the name of the weights, for one of the caches."""
    return {name: rest for (name, kept), rest in table(capsys.readouterr().out).items() if kept == cache}


def table(text: str) -> dict[tuple[str, str], list[str]]:
    """The cells of the table by the names of weights and cache."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {(name, kept): rest for name, kept, *rest in cells}


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
        weights, cache, _, least, tokens_per_s, bound, _ = rows[name]
        assert weights == f"{row.weight_bytes / 1e6:,.1f} MB" and cache == f"{row.cache_bytes / 1e6:,.1f} MB"
        assert least == f"{row.predicted_s * 1e3:,.3g} ms" and tokens_per_s == f"{3 / row.predicted_s:,.0f}"
        assert bound == "memory"
    outline = costs.outline(place)
    plain = costs.plain_weights(place, outline)
    for name, one in models.items():
        found = plain if name == "16 bits" else costs.stored_weights(methods_of(name), outline, plain)
        assert found.nbytes == size(deployed(one)).stored_bytes, "in memory, with what a step does not read"


CACHES = ("kv_int(bits=8)", "snapkv(budget=0.5)", "kvzip(budget=0.5, allocation=uniform), kv_int(bits=4)")


def test_caches_are_those_that_the_model_keeps(folder, tiny, tokens, capsys):
    place = folder("gemma3_text", max_position_embeddings=1024, head_dim=128)
    given_caches = [part for text in CACHES for part in ("--cache", text)]
    assert main(["cost", place, *given("rtn(bits=4, group_size=16)"), *given_caches, *ARGUMENTS]) == 0
    rows = table(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(place).bfloat16().requires_grad_(False)
    assert len(rows) == 2 * 4, "every combination, with 16 bits"
    for text in CACHES:
        with attached(model, text) as attachment:
            cache = attachment.cache()
            model(tokens(1, 300)[0], past_key_values=cache)
        behind = 3 * sum(t.nbytes for layer in cache.filled for t in layer.held) / 1e6  # and a few of a window
        for weights in ("16 bits", "rtn(bits=4, group_size=16)"):
            assert float(rows[weights, text][1].split()[0]) == pytest.approx(behind, abs=0.07)


def test_evicted_positions_are_not_multiplied(capsys):
    half = ["--cache", "half: snapkv(budget=0.5)", "--cache", "kv_fp8"]
    assert main(["cost", "llama-8b", "--context", "8192", "--device", "l4", *half]) == 0
    rows = table(capsys.readouterr().out)
    whole, evicted, codes = (float(rows["16 bits", name][2].split()[0]) for name in ("16 bits", "half", "kv_fp8"))
    attention = 2 * 32 * 32 * (128 + 128) * 8192 / 1e9  # layers, heads, channels of keys and values
    assert whole == codes and whole - evicted == pytest.approx(attention / 2, abs=0.02)


def test_what_fits_into_a_memory(capsys):
    """The shape of Llama-3.1-8B, with 8,030,261,248 parameters and 131,072 bytes of cache for each token in 16 bits."""
    arguments = ["cost", "llama-8b", "--memory", "24GB", "--context", "8192", "--device", "rtx-4090"]
    few = ["--recipe", "four: gptq(bits=4)", "--cache", "half: snapkv(budget=0.5)"]
    assert main([*arguments, *few]) == 0
    out = capsys.readouterr().out
    rows = table(out)
    weights, each, room, sequences, _, _, bound, prompt, swap = rows["16 bits", "16 bits"]
    assert (weights, each, bound) == ("16,060.5", "1,073.7", "memory")
    wide = 8192 * 2 * 3 * (4096 + 14336) + 6 * 128256
    assert room == f"{wide / 1e6:,.1f}" and sequences == f"{(24_000_000_000 - 16_060_522_496 - wide) // 1_073_741_824}"
    assert float(rows["16 bits", "half"][2].replace(",", "")) == pytest.approx(
        (wide + 1_073_741_824 / 2) / 1e6, abs=0.2
    )
    assert prompt == "800 ms, compute" and swap == "34.1 ms", "1,073,741,824 bytes at 31.5 GB/s"
    assert "a switch moves the cache of one to the host" in out
    assert rows["four", "half"][-1] == "most sequences, most tokens/s" and len(rows["four", "16 bits"]) == 9
    assert "weights, four: gptq(bits=4, group_size=64)\ncache, half: snapkv(budget=0.5)\n" in out
    assert main([*arguments, *few, "--batch", "12"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["16 bits", "16 bits"][3:] == ["6", "6 fit"] and rows["four", "half"][-1].startswith("most sequences")


def test_standard_choices_and_a_memory_that_is_too_small(capsys):
    arguments = ["cost", "tiny", "--device", "l4", "--context", "512"]
    assert main([*arguments, "--memory", "30MB"]) == 0
    rows = table(capsys.readouterr().out)
    assert len(rows) == 4 * 5
    assert main([*arguments, "--memory", "3MB"]) == 2
    said = capsys.readouterr().err
    assert "`--memory` (=3MB) is too small: one sequence of 512 tokens needs at least " in said
    assert "MB, with weights 4 bits, table (" in said
    assert main([*arguments, "--memory", "30MB", "--batch", "100000"]) == 2
    assert "`--batch` (=100000) does not fit into `--memory` (=30MB): at most " in capsys.readouterr().err


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


@pytest.mark.parametrize("more", [[], ["--memory", "24GB"], ["--memory", "6GB", "--disk", "2GB"]])
def test_a_prediction_is_given_as_json(more, capsys):
    """With the numbers that the table shows."""
    arguments = ["cost", "llama-8b", "--device", "l4", "--recipe", "gptq(bits=4)", *more]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    rows = table(capsys.readouterr().out)
    assert said["cache_bytes_per_token"] == 131_072 and said["device"] == "l4" and len(said["rows"]) == len(rows)
    first = said["rows"][0]
    shown = f"{first['held_bytes' if '--disk' in more else 'weight_bytes'] / 1e6:,.1f}"
    assert shown in " ".join(map(" ".join, rows)) + " ".join(next(iter(rows.values())))


def test_a_device_by_its_data_sheet():
    ceilings, how = ceilings_of("a100-80gb")
    assert ceilings.memory == pytest.approx(2.039e12) and ceilings.rates == {"bfloat16": 312e12}
    assert how == "its data sheet"
    assert all(0.1 < bandwidth < 10 and 50 < rate < 3000 for bandwidth, rate, _ in DATA_SHEETS.values())
    assert link_of("a100-80gb") == pytest.approx(16 * 16e9 * 128 / 130 / 8, rel=1e-3), "16 lanes of 16 GT/s"
    assert link_of("h200") == 2 * link_of("l4") and link_of("here") is None


BLOCK = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 2  # bytes of the linears of a block of Llama-8B
NORMS, HEAD = 2 * 4096 * 2, 128256 * 4096 * 2


@pytest.fixture(scope="module")
def llama_8b():
    return costs.plain_weights("llama-8b", costs.outline("llama-8b"))


@pytest.mark.parametrize(("disk", "bound"), [(2e9, "disk"), (100e9, "link"), (None, "link")])
def test_weights_in_three_tiers(disk, bound, llama_8b):
    """9 blocks and the head stay in 6 GB, 9 more in 5 GB of the host, where two are staged; 14 on a disk. Without a disk
    the host holds all 23."""
    tiers = costs.tiers_of("16 bits", llama_8b, 6 * 10**9, 5 * 10**9 if disk else 12 * 10**9, bool(disk))
    one, away = BLOCK + NORMS, 14 if disk else 0
    assert tiers == Tiers(HEAD + 9 * one, (23 - away) * one, away * one, HEAD + 4096 * 2), "the last: embedding, norm"
    row = predict("", llama_8b.work, context=1024, ceilings=ceilings_of("rtx-4090")[0])
    seconds = tiers.seconds(row, link=31.5e9, disk=disk)
    assert max(seconds, key=seconds.__getitem__) == bound and list(seconds) == ["memory", "link", "disk"]
    assert seconds["memory"] == row.predicted_s and seconds["link"] == pytest.approx(23 * one / 31.5e9)
    assert seconds["disk"] == pytest.approx(away * one / (disk or 1))


def test_a_host_that_is_too_small_and_a_device_that_is_large_enough(llama_8b):
    needed = (23 * (BLOCK + NORMS) + HEAD + 4096 * 2) / 1e9
    with pytest.raises(ValueError, match=rf"`--host-memory` \(=11000000000 bytes\) must be at least {needed:.2f} GB"):
        costs.tiers_of("16 bits", llama_8b, 6 * 10**9, 11 * 10**9, False)
    with pytest.raises(ValueError, match=r"`--host-memory` \(=100000000 bytes\) does not hold two"):
        costs.tiers_of("16 bits", llama_8b, 6 * 10**9, 10**8, True)
    tiers = costs.tiers_of("16 bits", llama_8b, 17 * 10**9, 10**6, False)
    assert tiers.streamed_bytes == 0 and tiers.held_bytes + tiers.rest_bytes == llama_8b.nbytes


def test_tiers_are_shown_with_what_binds(capsys):
    """Also as JSON. A link that is given counts in place of the data sheet's."""
    arguments = ["cost", "llama-1b", "--device", "l4", "--memory", "1.5GB", "--host-memory", "0.8GB", "--disk", "5GB"]
    assert main([*arguments, "--link", "4GB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    row = said["rows"][0]
    assert said["link_bytes_per_s"] == 4e9 and row["disk_bytes"] == 1.5 * row["host_bytes"], "6 and 4 blocks of 16"
    assert row["disk_seconds"] == row["disk_bytes"] / 5e9 and row["link_seconds"] == row["streamed_bytes"] / 4e9
    assert (row["bound"], row["seconds"]) == ("link", row["link_seconds"])
    assert (row["prompt_bound"], row["prompt_seconds"]) == ("link", row["link_seconds"])
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"{row['disk_bytes'] / 1e6:,.1f} MB" in shown and "between host and device: 31.5 GB/s" in shown
    assert shown.split("\n\n")[0].splitlines()[2].endswith("disk      146 ms, disk"), "as the link is faster"
    assert "caches and activations come on top of --memory" in shown


def test_the_time_of_a_prompt(llama_8b):
    """By operations if it is long, by the bytes of the weights and of its cache if it is short."""
    how = {"like": llama_8b.work, "ceilings": ceilings_of("rtx-4090")[0]}
    row = predict_prompt("", llama_8b.model, tokens=8192, **how)
    attention = 32 * 32 * (128 + 128) * 8192 * 8193 / 2  # layers, heads, channels of keys and values, pairs
    assert row.flops == 2 * (8192 * 32 * BLOCK / 2 + HEAD / 2 + attention), "logits of the last token alone"
    assert (row.bound, row.predicted_s) == ("compute", pytest.approx(row.flops / 165e12))
    row = predict_prompt("", llama_8b.model, tokens=16, **how)
    assert row.cache_bytes == 16 * 131_072
    assert row.weight_bytes == 32 * (BLOCK + NORMS) + HEAD + 4096 * 2 + 16 * 4096 * 2
    assert (row.bound, row.predicted_s) == (
        "memory",
        pytest.approx((row.weight_bytes + row.cache_bytes) / 1.008e12),
    )


def test_a_cache_is_moved_over_the_link(capsys):
    arguments = ["cost", "tiny", "--memory", "30MB", "--device", "l4", *given("rtn"), "--cache", "kv_int"]
    assert main([*arguments, "--link", "20MB", "--json"]) == 0
    plain, packed, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert plain["cache_bytes"] == 1024 * 256 and plain["swap_seconds"] == 1024 * 256 / 20e6
    assert packed["swap_seconds"] == packed["cache_bytes"] / 20e6 < plain["swap_seconds"] / 2
    assert packed["prompt_seconds"] == plain["prompt_seconds"], "a prompt is read before its cache is stored"


def test_the_published_peaks_follow_from_shapes():
    """Yi-34B on an A100: 34.4B parameters, and 60 layers with 8 heads of 128 channels for keys and for values."""
    (file,) = (ROOT / "reports" / "published" / "papers").glob("peak-analysis-*.jsonl")
    long, short = [json.loads(line) for line in file.read_text().splitlines()]
    token = 60 * 2 * 8 * 128 * 2
    for said, context in ((long, 50_000), (short, 4_000)):
        assert said["cache_bytes_per_token"] == token and round(said["rows"][0]["weight_bytes"] / 2e9, 1) == 34.4
        assert said["rows"][0]["swap_seconds"] == context * token / 31.5e9
        room, left = said["rows"][0]["room"], 80 * 2**30 - said["rows"][0]["weight_bytes"]
        assert said["rows"][0]["sequences"] == (left - room) // (context * token)


def test_what_a_disk_gives_of_weights_that_do_not_fit(capsys):
    """A fifth of Llama-8B in memory: the rest is read for every token. In 4 bits all of it fits."""
    more = ["--memory", "6GB", "--disk", "2GB", "--device", "h100-sxm", "--recipe", "gptq(bits=4)"]
    assert main(["cost", "llama-8b", *more]) == 0
    said = capsys.readouterr().out
    rows = {name: rest for (name, _), rest in table(said).items()}
    block, head = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2) * 2, 128256 * 4096 * 2  # bytes
    away = 32 - (6_000_000_000 - head - 2 * block) // block
    assert rows["16 bits"][:2] == ["0.0 MB", f"{away * block / 1e6:,.1f} MB"]
    assert rows["16 bits"][5:7] == ["5.02 s", "5.02 s"] and rows["16 bits"][-2] == "disk"
    assert rows["gptq(bits=4)"][1] == "0.0 MB" and rows["gptq(bits=4)"][-2] == "memory"
    assert "a step of 1 x 1 token" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk", "2GB", "--memory", "1GB", "--cache", "kv_int"], "`--cache` does not matter with `--disk`"),
        (["--disk", "2GB"], "`--disk` (='2GB') needs `--memory`"),
        (["--host-memory", "2GB"], "`--host-memory` (='2GB') needs `--memory`"),
        (["--host-memory", "2GB", "--memory", "1GB", "--device", "here"], "`--host-memory` (='2GB') needs `--link`"),
        (["--host-memory", "2GB", "--memory", "1GB", "--cache", "kv_int"], "does not matter with `--host-memory`"),
        (["--host-memory", "none", "--memory", "1GB"], "`--host-memory` (='none') must be a number of bytes"),
        (["--link", "20GB"], "`--link` (='20GB') needs `--memory`"),
        (["--link", "-1", "--memory", "1GB"], "`--link` (='-1') must be a number of bytes"),
        (["--disk", "2GB", "--memory", "1000"], "`--memory` (=1000 bytes) does not hold two"),
        (["--context", "0"], "`--context` (=0) must be 1 or more"),
        (["--batch", "-2"], "`--batch` (=-2) must be 1 or more"),
        (["--device", "h100-sxn"], "`--device` (='h100-sxn') is not known; did you mean h100-sxm? It can be here, "),
        (["--memory", "lots"], "`--memory` (='lots') must be a number of bytes, or a text such as '6GB'"),
        (["--cache", "zipvl"], "`--cache` (='zipvl'): what zipvl("),
        (["--cache", "rtn"], "`--cache` (='rtn'): rtn("),
        (["--cache", "kv_imt"], "`--cache` (='kv_imt'): kv_imt is not a method; did you mean kv_int?"),
        (["--cache", "snapkv, knorm"], "both decide which positions stay"),
        (["--recipe", "rtn", "--recipe", "rtn"], "`--recipe` (='rtn'): 'rtn' is the name of another row"),
        (
            ["--recipe", "rtn, kv_int"],
            "must do without kv_int(bits=4, group_size=64): `--cache` takes methods of the cache",
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
