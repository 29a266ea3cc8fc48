"""Policies of the KV cache beside kvpress: which positions each keeps of the same context.

$ .venv/bin/python seeds/peers/compare_kv.py prepare /tmp/peers/kv ../shared/data/paul_graham_essays/train.parquet
$ .venv/bin/python seeds/peers/compare_kv.py ours /tmp/peers/kv
$ /tmp/peers/kvpress/bin/python seeds/peers/compare_kv.py kvpress /tmp/peers/kv
$ .venv/bin/python seeds/peers/compare_kv.py table /tmp/peers/kv

kvpress 0.5.5 needs a transformers below 5.3, this workbench a later one: the model and the tokens are the same, float32
on a CPU. Kept positions of the peer are found by looking its keys up among those of a full cache. KVzip and Ada-KV of
the peer mask positions without freeing memory, so the script reads the mask. For KVzip the peer asks the model in words
to repeat the text, in the model's chat template, so its scores differ a little. KVzap has the same networks in both,
with random weights.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS = 1000
WIDTH = 64  # width of the networks of `kvzap`, which have random weights


class CacheCase(NamedTuple):
    """A policy of ours, its knobs, and what makes the peer's press of its package, a folder and the share that goes."""

    policy: str
    knobs: dict[str, Any]
    press: Callable[[ModuleType, Path, float], Any]


def _plain(name: str, **knobs: object) -> Callable[[ModuleType, Path, float], Any]:
    return lambda peer, folder, ratio: getattr(peer, name)(compression_ratio=ratio, **knobs)


def _ada(peer: ModuleType, folder: Path, ratio: float) -> Any:
    return peer.AdaKVPress(_snap(peer, folder, ratio))


def _kvzap(peer: ModuleType, folder: Path, ratio: float) -> Any:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    networks = torch.load(folder / "kvzap.pt")  # by the peer's parameter names
    inputs, outputs, layers = (networks[name] for name in ("inputs", "outputs", "layers"))
    model = KVzapModel(KVzapConfig(input_dim=inputs, output_dim=outputs, n_modules=layers, hidden_dim=WIDTH))
    model.load_state_dict(networks["state"])
    press = peer.KVzapPress(compression_ratio=ratio)
    press.post_init_from_model = lambda _: None  # it would ask the hub
    press.kvzap_model = model
    return press


_snap = _plain("SnapKVPress", window_size=32, kernel_size=5)
CASES = {
    "streaming": CacheCase("streaming", {}, _plain("StreamingLLMPress", n_sink=4)),
    "knorm": CacheCase("knorm", {}, _plain("KnormPress")),
    "keydiff": CacheCase("keydiff", {}, _plain("KeyDiffPress")),
    "tova": CacheCase("tova", {}, _plain("TOVAPress")),
    "snapkv": CacheCase("snapkv", {"observed": 32}, _snap),
    "snapkv, ada": CacheCase("snapkv", {"observed": 32, "allocation": "ada"}, _ada),
    "expected_attention": CacheCase("expected_attention", {}, _plain("ExpectedAttentionPress", epsilon=1e-2)),
    "kvzip": CacheCase("kvzip", {}, _plain("KVzipPress")),
    "kvzap, the same networks": CacheCase("kvzap", {"allocation": "uniform", "sinks": 0, "recent": 0}, _kvzap),
}


def prepare(folder: Path, options: argparse.Namespace) -> None:
    from compress import load_model
    from compress.inputs.corpus import load_text

    model, tokenizer = load_model("smollm2-135m")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    ids = tokenizer("\n\n".join(load_text(options.corpus, "evaluation")), return_tensors="pt").input_ids
    torch.save(ids[:, :TOKENS].clone(), folder / "ids.pt")
    _draw_networks(model.config, folder)


def _draw_networks(config: Any, folder: Path) -> None:
    """Networks of `kvzap` with random weights, in the forms of both."""
    from compress.kv.learned.networks import ScoringNetwork, write

    torch.manual_seed(0)
    inputs, outputs, layers = config.hidden_size, config.num_key_value_heads, config.num_hidden_layers
    ours, theirs = {}, {}
    for i in range(layers):
        up, down = torch.randn(inputs, WIDTH) / inputs**0.5, torch.randn(WIDTH, outputs) / WIDTH**0.5
        ours[i] = ScoringNetwork(
            torch.zeros(inputs), torch.ones(inputs), up, torch.zeros(WIDTH), down, torch.zeros(outputs)
        )
        for place, matrix in (("0", up), ("2", down)):
            theirs[f"layers.{i}.{place}.weight"] = matrix.T.contiguous()
            theirs[f"layers.{i}.{place}.bias"] = torch.zeros(matrix.shape[1])
    write(ours, folder / "kvzap.safetensors")
    torch.save({"inputs": inputs, "outputs": outputs, "layers": layers, "state": theirs}, folder / "kvzap.pt")


def ours(folder: Path, options: argparse.Namespace) -> None:
    from compress import METHODS, load_model
    from compress.kv import attached

    model, _ = load_model(str(folder / "model"))
    ids, found = torch.load(folder / "ids.pt"), {}
    with attached(model) as attachment, torch.no_grad():
        read = attachment.cache(observes=True, traces=True)
        model(ids, past_key_values=read)
        for name, (policy, knobs, _) in CASES.items():
            file = {"path": str(folder / "kvzap.safetensors")} if policy == "kvzap" else {}
            for budget in options.budgets:
                cache = read.compressed(METHODS[policy](budget=budget, **file, **knobs))
                found[f"{name} {budget}"] = [
                    [kept.tolist() for kept in layer.kept_positions()[0]] for layer in cache.own
                ]
    (folder / "ours.json").write_text(json.dumps(found))


def kvpress(folder: Path, options: argparse.Namespace) -> None:
    import kvpress as peer
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids, found = torch.load(folder / "ids.pt"), {}
    with torch.no_grad():
        full = DynamicCache()
        model(ids, past_key_values=full)
        for name, (_, _, press) in CASES.items():
            for budget in options.budgets:
                cache = DynamicCache()
                for block in model.model.layers:  # remove the mask of an earlier press
                    block.self_attn.masked_key_indices = None
                with press(peer, folder, 1 - budget)(model):
                    model(ids, past_key_values=cache)
                masked = [getattr(block.self_attn, "masked_key_indices", None) for block in model.model.layers]
                if masked[0] is not None:  # this press does not evict positions, but masks them
                    shown = [_shown(indices, layer.keys) for indices, layer in zip(masked, full.layers, strict=True)]
                    found[f"{name} {budget}"] = shown
                    continue
                pairs = zip(cache.layers, full.layers, strict=True)
                found[f"{name} {budget}"] = [
                    [_places(k, f) for k, f in zip(a.keys[0], b.keys[0], strict=True)] for a, b in pairs
                ]
    (folder / "kvpress.json").write_text(json.dumps(found))


def _places(kept: Tensor, full: Tensor) -> list[int]:
    """The positions of the kept keys [n, D] among all keys [T, D]."""
    return torch.cdist(kept.double(), full.double()).argmin(1).sort().values.unique().tolist()


def _shown(masked: tuple[Tensor, ...], keys: Tensor) -> list[list[int]]:
    """The positions that are not among the hidden (rows, heads, positions)."""
    shown = torch.ones(keys.shape[1:3], dtype=torch.bool)
    shown[masked[1], masked[2]] = False
    return [row.nonzero().flatten().tolist() for row in shown]


def table(folder: Path, options: argparse.Namespace) -> None:
    mine, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in ("ours", "kvpress"))
    print("| policy, budget | positions that both keep | least of any head |\n| --- | ---: | ---: |")
    for case, layers in mine.items():
        if case not in theirs:
            continue
        shares = [
            len(set(a) & set(b)) / max(len(b), 1)
            for x, y in zip(layers, theirs[case], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        print(f"| {case} | {sum(shares) / len(shares) * 100:.2f} % | {min(shares) * 100:.1f} % |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "ours", "kvpress", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("corpus", nargs="?", default="pydocs")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25])
    given = parser.parse_args()
    globals()[given.step](given.folder, given)
