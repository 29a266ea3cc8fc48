"""Weights on disk: the same bits as in memory, block by block, from files that are checked before they are used."""

import copy
import gc
import shutil
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import apply, calibration, load_compressed, load_model, save_compressed
from compress.checkpoint import workbench
from compress.checkpoint.files import weight_files
from compress.checkpoint.on_disk import load_compressed_on_disk, tensors_of
from compress.inputs.on_disk import load_on_disk
from compress.linear import CompressedLinear, sharing_copy
from compress.recipe import parse_recipe
from compress.walk import offload
from compress.walk.blocks import find_blocks
from compress.walk.capture import activations_on_disk, on_device
from compress.walk.identity import weights_sha256
from compress.walk.offload import AwayLinear, named_tensors, offloaded_parts, put_on_disk
from compress.walk.shards import WorkFolder, write_tensors
from compress.walk.streaming import Streamed, scorable
from compress.walk.window import in_window
from eval.evaluate import evaluate, score_text
from eval.text.divergence import compare_on_text
from eval.text.perplexity import perplexity
from kernels.support.deploy import cast
from tests.architectures import tiny_model

CPU = torch.device("cpu")
GPTQ = "gptq(bits=3, group_size=16, min_tokens=8)"


def same(on_disk, in_memory) -> None:
    expected, found = in_memory.state_dict(), dict(named_tensors(on_disk))
    assert expected.keys() == found.keys()
    assert all(
        torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype for name, tensor in expected.items()
    )


def test_a_model_runs_with_its_weights_on_disk(any_model, tokens):
    on_disk = put_on_disk(copy.deepcopy(any_model))
    assert all(p.is_meta for p in on_disk.parameters())
    for ids in tokens(2, 20):
        assert torch.equal(on_disk(ids).logits, any_model(ids).logits)
    assert all(p.is_meta for p in on_disk.parameters()), "what a pass needed is given back"
    assert weights_sha256(on_disk) == weights_sha256(any_model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_of_transformers_are_read_as_it_reads_them(any_model, tokens, tmp_path, dtype):
    any_model.save_pretrained(tmp_path, max_shard_size="100KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    if any_model.config.model_type == "gpt_oss":
        with pytest.raises(ValueError, match="keeps model.layers.0.* in float32; dtype='float32' works"):
            load_on_disk(tmp_path, torch.float16, home="cpu")
    on_disk = load_on_disk(tmp_path, dtype, home="cpu").eval()
    assert on_disk.dtype == dtype
    ids = tokens(1, 20)[0]
    assert torch.equal(on_disk(ids).logits, expected(ids).logits)
    same(on_disk, expected)
    assert {n: b.dtype for n, b in on_disk.named_buffers()} == {n: b.dtype for n, b in expected.named_buffers()}


@pytest.mark.parametrize(
    "recipe",
    [
        f"smoothquant, wanda, {GPTQ}",
        pytest.param("awq(group_size=16), rtn(group_size=16)", marks=pytest.mark.slow),
        pytest.param("wanda(pattern='2:4'), int8", marks=pytest.mark.slow),
        pytest.param("magnitude(allocation='global')", marks=pytest.mark.slow),
        pytest.param("wanda(ratio=0.4, allocation='adaptive')", marks=pytest.mark.slow),
        pytest.param(f"layer_drop(count=1, target='block'), {GPTQ}", marks=pytest.mark.slow),
    ],
)
def test_recipes_of_several_methods(recipe, tiny, tokens):
    """Each method reads what the one before it wrote; errors are those against what was there first."""
    model = tiny("qwen2", num_hidden_layers=3)
    on_disk = apply(parse_recipe(recipe), put_on_disk(copy.deepcopy(model)), tokens())
    in_memory = apply(parse_recipe(recipe), model, tokens())
    same(on_disk.model, model)
    assert [(r.name, r.error) for r in on_disk.layers] == [(r.name, r.error) for r in in_memory.layers]


def test_one_calibration_serves_weights_on_disk(tiny, tokens, tmp_path):
    model, recipe = tiny("qwen2", num_hidden_layers=3), parse_recipe(f"smoothquant, wanda, {GPTQ}")
    on_disk = apply(recipe, put_on_disk(copy.deepcopy(model)), tokens(), calibrate="once", work_path=tmp_path)
    same(on_disk.model, apply(recipe, model, tokens(), calibrate="once").model)


def test_fused_experts_are_split_on_disk(tiny, tokens):
    model = tiny("mixtral")
    on_disk = apply(parse_recipe(GPTQ), put_on_disk(copy.deepcopy(model)), tokens())
    same(on_disk.model, apply(parse_recipe(GPTQ), model, tokens()).model)


def test_a_copy_has_weights_of_its_own_once_they_change(tiny, tokens):
    model = put_on_disk(tiny("llama"))
    before = weights_sha256(model)
    other = apply(parse_recipe(GPTQ), sharing_copy(model), tokens()).model
    assert weights_sha256(model) == before != weights_sha256(other)
    assert any(isinstance(m, AwayLinear) for m in other.modules())
    assert not any(isinstance(m, CompressedLinear) for m in model.modules())


def test_what_replaces_a_linear_lets_its_weight_go(tiny, monkeypatch):
    """While a recipe runs; else the weights of all blocks that are done would add up in memory."""
    given, left = [], []
    load, give_back = offload.Offloaded._load, offload.give_memory_back

    def loading(part, device):
        load(part, device)
        given.extend(map(weakref.ref, part.module.parameters()))

    def gone():
        give_back()
        left.append(sum(one() is not None for one in given))

    monkeypatch.setattr(offload.Offloaded, "_load", loading)
    monkeypatch.setattr(offload, "give_memory_back", gone)
    apply("rtn(bits=4, group_size=16)", put_on_disk(tiny("mixtral")))
    assert len(given) > 20 and len(left) >= 4 and max(left) < 3  # one may be the last that was solved


def test_only_what_changed_is_written_and_files_go_with_their_users(tiny, tmp_path):
    model = put_on_disk(tiny("llama"), offload_path=tmp_path)
    folder = next(tmp_path.iterdir())
    blocks = find_blocks(model)[1]
    files = set(folder.iterdir())
    with on_device(blocks[0], CPU):
        assert not blocks[0].mlp.up_proj.weight.is_meta
    assert set(folder.iterdir()) == files, "it was only read"
    for factor in (2, 3):
        with on_device(blocks[0], CPU):
            blocks[0].mlp.up_proj.weight.mul_(factor)
    assert len(set(folder.iterdir()) - files) == 1, "the file of the first change is gone"
    del model, blocks
    gc.collect()
    assert not folder.exists()


def test_a_pass_that_ends_in_an_error_leaves_the_block_on_disk(tiny, tokens):
    model = put_on_disk(tiny("llama"))
    blocks = find_blocks(model)[1]
    with pytest.raises(KeyboardInterrupt), on_device(blocks[0], CPU):
        blocks[0].mlp.down_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        model(tokens(1)[0])
    assert all(p.is_meta for p in blocks.parameters())


def test_damaged_folders_are_refused(tiny, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-8], b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors' is damaged or not complete"):
            load_on_disk(tmp_path, torch.float32, home="cpu")
    state = dict(model.state_dict())
    write_tensors(file, state | {"extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"\(LlamaForCausalLM\) does not use 1 of the weights: extra"):
        load_on_disk(tmp_path, torch.float32, home="cpu")
    del state["model.norm.weight"]
    write_tensors(file, state)
    with pytest.raises(ValueError, match="its file lacks 1 of the weights: model.norm.weight"):
        load_on_disk(tmp_path, torch.float32, home="cpu")
    file.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        load_on_disk(tmp_path, torch.float32, home="cpu")


def test_work_folders_of_killed_processes_are_removed(tmp_path):
    left = tmp_path / "workbench-offload-killed"
    left.mkdir()
    (left / "lock").touch()
    mine = WorkFolder(tmp_path)
    WorkFolder(tmp_path)
    assert not left.exists() and mine.path.exists()


def test_safetensors_are_written_as_the_library_reads_them(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(4)[1:],
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(2.5),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "transposed": torch.randn(2, 3).t(),
        "codes": torch.arange(5).to(torch.uint16),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    again = load_file(tmp_path / "x.safetensors")
    assert all(
        torch.equal(t.float(), again[name].float()) and t.dtype == again[name].dtype for name, t in tensors.items()
    )
    assert list(offloaded_parts(torch.nn.Linear(2, 2))) == []


def test_texts_are_scored_block_by_block_to_the_same_bits(any_model, tokens):
    """All windows go through one block after the other."""
    other = copy.deepcopy(any_model)
    for p in other.parameters():
        p.mul_(1.01)
    ids = tokens(1, 100)[0]
    how = {"window": 24, "limit": 4}
    expected = compare_on_text(any_model, {"other": other}, ids, **how)
    streamed = [Streamed(put_on_disk(m)) for m in (any_model, other)]
    assert compare_on_text(streamed[0], {"other": streamed[1]}, ids, **how) == expected
    assert perplexity(streamed[0], ids, **how) == expected[0]["baseline"]


def test_models_on_disk_are_evaluated_on_texts_alone(tiny, tokens):
    ids, model = tokens(1, 100)[0], put_on_disk(tiny("llama"))
    other = apply(parse_recipe(GPTQ), sharing_copy(model), tokens()).model
    scores = evaluate(scorable(other), None, baseline=scorable(model), texts={"t": ids}, window=24, max_windows=3)
    in_memory = apply(parse_recipe(GPTQ), tiny("llama"), tokens()).model
    expected = score_text(in_memory, tiny("llama"), {"t": ids}, window=24, max_windows=3)
    assert scores.metrics["compressed"] == expected and scores.metrics["baseline"]["perplexity_t"] > 1
    assert scores.dtype == "float32" and "weights lie on disk" in scores.notes[0]
    assert scorable(in_memory) is in_memory


@pytest.mark.parametrize("sequential", [True, False])
def test_activations_on_disk_change_nothing(tiny, tokens, tmp_path, sequential):
    recipe = parse_recipe(f"gptq(bits=3, group_size=16, min_tokens=8, sequential={sequential})")
    in_memory = apply(recipe, tiny("llama"), tokens())
    folder = WorkFolder(tmp_path)
    with activations_on_disk(folder):
        on_disk = apply(recipe, tiny("llama"), tokens())
    same(on_disk.model, in_memory.model)
    assert [path.name for path in folder.path.iterdir()] == ["lock"], "every file is gone with its activations"


def test_experts_of_files_are_stacked_when_they_are_read(tiny, tokens, tmp_path):
    """transformers writes the matrices of every expert by themselves, and has them as one tensor in memory."""
    model, (ids,) = tiny("qwen3_moe", num_experts=12), tokens(1, 20)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    on_disk = load_on_disk(tmp_path / "model", torch.float32, home="cpu").eval()
    assert torch.equal(on_disk(ids).logits, model(ids).logits)
    cut = next(name for name in weight_files(tmp_path / "model") if "experts.7.up_proj" in name)
    with in_window(on_disk, "1MB"):
        written = on_disk.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(written, model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
    tensors = dict(named_tensors(on_disk))
    whole = {name: t.read() for name, t in tensors_of(tmp_path / "model").items() if name != cut}
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape[0] == 12
    shutil.rmtree(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "model")
    write_tensors(tmp_path / "model" / "model.safetensors", whole)
    with pytest.raises(
        ValueError, match=r"the files lack some experts of model\.layers\.0\.mlp\.experts\.gate_up_proj"
    ):
        load_on_disk(tmp_path / "model", torch.float32, home="cpu")


def test_weights_that_transformers_makes_in_other_ways_are_refused(tmp_path):
    """The convolutions of three linears of Kimi's become one."""
    tiny_model("kimi_linear").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`weights` \(='disk'\) cannot take KimiLinearForCausalLM.*weights='memory'"):
        load_on_disk(tmp_path, torch.float32, home="cpu")


@pytest.mark.parametrize(
    "architecture, recipe",
    [
        pytest.param(architecture, recipe, marks=[pytest.mark.slow] * ((turn, at) != (2, 1)))
        for turn, (architecture, left) in enumerate(
            {"llama": "*down_proj", "mixtral": "*down_proj.*", "gpt2": "*mlp.c_proj", "opt": "*fc2"}.items()
        )
        for at, recipe in enumerate((GPTQ, f"layer_drop(count=1, target='block'), wanda(skip='{left}'), {GPTQ}"))
    ],
)
def test_a_checkpoint_is_written_block_by_block(architecture, recipe, tiny, tokens, tmp_path):
    """It is the one of a model in memory; loaded into memory or left on disk, it gives the same."""
    ids = tokens(1, 20)[0]
    model = tiny(architecture, **({"n_layer": 3} if architecture == "gpt2" else {"num_hidden_layers": 3}))
    result = apply(parse_recipe(recipe), put_on_disk(copy.deepcopy(model), offload_path=tmp_path), tokens())
    in_memory = apply(parse_recipe(recipe), model, tokens()).model
    save_compressed(result, tmp_path / "saved", shard_bytes=20_000)
    loaded = load_compressed(tmp_path / "saved")
    same(result.model, loaded)
    assert torch.equal(loaded(ids).logits, in_memory(ids).logits)
    again = load_compressed_on_disk(tmp_path / "saved")
    same(again, in_memory)
    assert torch.equal(again(ids).logits, in_memory(ids).logits)
    halves = load_compressed_on_disk(tmp_path / "saved", torch.bfloat16)
    assert torch.equal(halves(ids).logits, load_compressed(tmp_path / "saved").to(torch.bfloat16)(ids).logits)


def test_a_block_that_reads_differently_is_named_and_nothing_is_saved(tiny, tokens, tmp_path, monkeypatch):
    result = apply(parse_recipe(GPTQ), put_on_disk(tiny("llama")), tokens())

    def damaged(folder):
        again = load_compressed_on_disk(folder)
        with on_device(again.model.layers[1], CPU):
            again.model.layers[1].input_layernorm.weight.mul_(1.5)
        return again

    monkeypatch.setattr(workbench, "load_compressed_on_disk", damaged)
    with pytest.raises(RuntimeError, match="block 1 of the saved model gives something else: input_layernorm.weight"):
        save_compressed(result, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_formats_that_are_written_from_memory_are_refused(tiny, tokens, tmp_path):
    result = apply(parse_recipe(GPTQ), put_on_disk(tiny("llama")), tokens())
    with pytest.raises(ValueError, match=r"`save_format` \(='gguf'\) is written from memory.*'workbench' works"):
        save_compressed(result, tmp_path / "saved", save_format="gguf")


def test_load_model_leaves_weights_on_disk(tokens, tmp_path):
    ids = tokens(1, 20)[0]
    (on_disk, tokenizer), (in_memory, _) = load_model("tiny", weights="disk", offload_path=tmp_path), load_model("tiny")
    assert torch.equal(on_disk(ids).logits, in_memory(ids).logits)
    save_compressed(apply(parse_recipe("rtn"), on_disk), tmp_path / "saved", tokenizer)
    name = str(tmp_path / "saved")
    (on_disk, _), (in_memory, _) = load_model(name, weights="disk"), load_model(name)
    same(on_disk, in_memory)
    with pytest.raises(ValueError, match=r"`weights` \(='gpu'\) must be one of memory, disk"):
        load_model("tiny", weights="gpu")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gptq", "smoothquant, wanda, rtn", "awq"])
def test_the_embedded_model_gives_the_same_bits(real, data, tmp_path, recipe):
    model, tokenizer = real
    batches = calibration(tokenizer, corpus="c4", samples=4, seqlen=256)
    on_disk, _ = load_model("smollm2-135m", weights="disk", offload_path=tmp_path)
    result = apply(parse_recipe(recipe), on_disk, batches)
    expected = apply(parse_recipe(recipe), model, batches)
    assert result.identity == expected.identity
    same(result.model, expected.model)
    assert [(r.name, r.error) for r in result.layers] == [(r.name, r.error) for r in expected.layers]
    save_compressed(result, tmp_path / "saved")
    same(result.model, load_compressed(tmp_path / "saved"))


def test_a_model_on_disk_is_cast_as_one_in_memory(tiny, tokens, tmp_path):
    recipe, ids = parse_recipe("magnitude(ratio=0.3, skip='*up_proj')"), tokens(1, 20)[0]
    result = apply(recipe, put_on_disk(tiny("llama")))
    in_memory = cast(apply(recipe, tiny("llama")).model, torch.bfloat16)
    cast(result.model, torch.bfloat16)
    assert torch.equal(result.model(ids).logits, in_memory(ids).logits)
    save_compressed(result, tmp_path / "saved")
    for again in (load_compressed(tmp_path / "saved"), load_compressed_on_disk(tmp_path / "saved")):
        assert again.dtype == torch.bfloat16 and torch.equal(again(ids).logits, in_memory(ids).logits)


def test_a_module_that_owns_a_tensor_beside_the_blocks_does_not_hold_their_weights(tiny, tokens):
    """Zaya's body has a scale of its residual stream."""
    model = tiny("zaya")
    on_disk = put_on_disk(copy.deepcopy(model))
    assert "model" not in offloaded_parts(on_disk)
    for one in (model, on_disk):
        apply(parse_recipe("wanda(ratio=0.5)"), one, tokens())
    same(on_disk, model)


def test_a_model_that_moves_its_tokens_to_the_table_is_refused(tiny, tmp_path):
    tiny("llama4_text").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`weights` .*moves the tokens to where model.embed_tokens.weight lies"):
        load_on_disk(tmp_path, torch.float32, home="cpu")
