"""Models of other tools at their best 4-bit settings, as dense float32 checkpoints that one scorer reads.

    python seeds/peers/prepare.py WORK                                   # the embedded model and the calibration tokens
    ENVIRONMENT/bin/python seeds/peers/dense_peers.py gptqmodel WORK OUT --group-size 32

Each tool runs in its own environment (README.md beside this file), on the same model and tokens. OUT/NAME becomes a
Hugging Face folder in which every quantised weight is replaced by its dequantised value; `peer.json` in it has the
name, the bytes of the whole model as the tool stores it (other weights in 16 bits), seconds and settings.
"""

import argparse
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from prepare import BITS, gptq_weights, load_tensors, with_gptqmodel, with_llmcompressor
from safetensors.torch import save_file
from torch import Tensor

LARGEST_LOSS = 0.3  # nats per token over the original's: 4 bits cost 0.05 to 0.2; more is a wrongly read format
CHECKED = 4  # calibration windows
TORCHAO_RATE = 1e-5  # of its training, if none is given


@dataclass
class Peer:
    """A model of another tool.

    weights: [out, in] of the quantised layers, dequantised, by name. nbytes: of the whole model as the tool stores it.
    """

    tool: str
    nbytes: int
    seconds: float
    settings: dict[str, str | int | float | bool]
    weights: dict[str, Tensor] = field(repr=False)


def gptqmodel(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """GPTQModel, its scales searched by the error to the power `mse`."""
    settings = {"group_size": options.group_size, "mse": 2.4}
    seconds = with_gptqmodel(source, ids, scratch, **settings)
    return Peer("gptqmodel", stored_bytes(scratch), seconds, settings, gptq_weights(scratch))


def llmcompressor(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """llm-compressor's GPTQ with its mse observer and static activation ordering."""
    settings = {"group_size": options.group_size, "observer": "memoryless_mse"}
    model, seconds = with_llmcompressor(source, ids, **settings)
    weights = {n: m.weight.detach().float() for n, m in model.named_modules() if hasattr(m, "weight_scale")}
    model.save_pretrained(scratch, save_compressed=True)
    settings |= {"actorder": "static", "dampening_frac": 0.01}
    return Peer("llmcompressor", stored_bytes(scratch), seconds, settings, weights)


def autoround(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """AutoRound: roundings and ranges tuned by block; `--iters 0` is its optimised rounding without tuning."""
    from auto_round import AutoRound
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    settings = {
        "scheme": "W4A16",
        "group_size": options.group_size,
        "iters": options.iters,
        "batch_size": options.batch,
    }
    settings |= {"lr": options.lr} if options.lr else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    start = time.perf_counter()
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(source),
        dataset=DataLoader(windows, batch_size=options.batch),
        nsamples=len(windows),
        seqlen=ids.shape[1],
        device_map="cpu",
        **settings,
    )
    with torch.enable_grad():
        rounding.quantize_and_save(str(scratch), format="auto_gptq")
    seconds = time.perf_counter() - start
    (saved,) = {file.parent for file in scratch.rglob("*.safetensors")}
    return Peer("autoround", stored_bytes(saved), seconds, settings, gptq_weights(saved))


def torchao(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """torchao's training in the presence of quantisation: weights are rounded in every pass, and learn to predict the
    next token of the calibration windows, with the norms, for `--updates`. The head and the embedding stay."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rounding = IntxFakeQuantizeConfig(torch.int4, group_size=options.group_size, is_symmetric=True)
    inside = lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head"  # noqa: E731
    quantize_(model, QATConfig(weight_config=rounding, step="prepare"), filter_fn=inside)
    model.get_input_embeddings().requires_grad_(False)
    rate = options.lr or TORCHAO_RATE
    settings = {"group_size": options.group_size, "updates": options.updates, "lr": rate, "batch": 2}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    start = time.perf_counter()
    with torch.enable_grad():
        for at in range(0, 2 * options.updates, 2):
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(at // len(ids)))
            windows = ids[order[[at % len(ids), (at + 1) % len(ids)]]]
            with torch.autocast("cpu", torch.bfloat16):
                model(windows, labels=windows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    rounded = {n: m for n, m in model.named_modules() if hasattr(m, "weight_fake_quantizer")}
    weights = {n: m.weight_fake_quantizer(m.weight).detach() for n, m in rounded.items()}
    count, whole = sum(w.numel() for w in weights.values()), sum(p.numel() for p in model.parameters())
    norms = {n: m.weight.detach() for n, m in model.named_modules() if n.endswith("norm")}
    nbytes = 2 * (whole - count) + count * BITS // 8 + 2 * count // options.group_size
    return Peer("torchao", nbytes, time.perf_counter() - start, settings, weights | norms)


def openvino(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """NNCF's int4 with activation-aware scales and scale estimation; embedding and head in its int8."""
    import nncf

    settings = {"mode": "int4_asym", "group_size": options.group_size, "awq": True, "scale_estimation": True}
    model = exported(source)
    ones, positions = torch.ones_like(ids[:1]), torch.arange(ids.shape[1])[None]
    windows = [
        {"input_ids": row[None].numpy(), "attention_mask": ones.numpy(), "position_ids": positions.numpy()}
        | {"beam_idx": torch.zeros(1, dtype=torch.int32).numpy()}
        for row in ids
    ]
    mode, more = nncf.CompressWeightsMode(settings["mode"]), {k: v for k, v in settings.items() if k != "mode"}
    start = time.perf_counter()
    with torch.enable_grad():
        model = nncf.compress_weights(
            model, mode=mode, ratio=1.0, dataset=nncf.Dataset(windows), subset_size=len(windows), **more
        )
    return saved("openvino", model, scratch, time.perf_counter() - start, settings)


def openvino16(source: Path, ids: Tensor, scratch: Path, options: argparse.Namespace) -> Peer:
    """OpenVINO's 16 bits: nothing is quantised."""
    return saved("openvino16", exported(source), scratch, 0.0, {})


def exported(source: Path) -> Any:
    """The model of a folder as OpenVINO has it, in the precision of its weights."""
    from optimum.intel import OVModelForCausalLM

    return OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=False, compile=False).model


def saved(tool: str, model: Any, scratch: Path, seconds: float, settings: dict[str, Any]) -> Peer:
    """An OpenVINO model that is written to `model.xml`, its floats in 16 bits."""
    import openvino as ov

    scratch.mkdir()
    ov.save_model(model, scratch / "model.xml", compress_to_fp16=True)
    return Peer(tool, (scratch / "model.bin").stat().st_size, seconds, settings, constants(model))


def constants(model: Any) -> dict[str, Tensor]:
    """The dequantised weights [out, in] of an OpenVINO model's linears and embedding, by name in the PyTorch model."""
    import openvino as ov

    inputs = {}
    for op in model.get_ordered_ops():
        assert not op.friendly_name.endswith("awq_mul"), "a scale is left in the activations"
        found = re.fullmatch(r"__module\.(.+)/(?:ov_ext::|aten::)(linear/MatMul|embedding/Gather)", op.friendly_name)
        if found and found[1] != "lm_head":  # tied
            inputs[found[1]] = op.input_value(0 if "Gather" in found[2] else 1)
    folded = ov.Model([ov.opset13.convert(value, "f32") for value in inputs.values()], [])
    compiled = ov.compile_model(folded, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    values = compiled([])
    return {name: torch.from_numpy(values[i].copy()) for i, name in enumerate(inputs)}


def stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's tensors; those that are floating-point count in 16 bits, a tied head not again."""
    tensors = load_tensors(folder)
    if "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors:
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]), "the head is not tied"
        del tensors["lm_head.weight"]
    return sum(t.numel() * min(t.element_size(), 2) if t.is_floating_point() else t.nbytes for t in tensors.values())


def write(peer: Peer, source: Path, out: Path, ids: Tensor) -> None:
    """The dense checkpoint of a peer in float32 with its `peer.json`, in a folder that is complete when it appears.

    ids [windows, seqlen] are the tokens to check it on.

    Raises:
        ValueError: a weight is missing in the source, or the checkpoint's loss is far from the source's.
    """
    tensors = load_tensors(source)
    for name, weight in peer.weights.items():
        original = tensors.get(f"{name}.weight")
        if original is None or original.shape != weight.shape:
            raise ValueError(f"{peer.tool} has {name} {tuple(weight.shape)}, and the model does not")
        tensors[f"{name}.weight"] = weight.float().contiguous()
    draft = source.with_name(f"{out.name}-dense")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    before, after = loss(source, ids), loss(draft, ids)
    if not after < before + LARGEST_LOSS:
        raise ValueError(f"{draft}: the loss on calibration tokens is {after:.3f}, of the original {before:.3f}")
    about = {"name": out.name, "bytes": peer.nbytes, "seconds": round(peer.seconds, 1), "settings": peer.settings}
    about |= {"weights": len(peer.weights), "calibration_loss": round(after, 4), "original_loss": round(before, 4)}
    about["cpu_seconds_of_process"] = round(time.process_time(), 1)  # `seconds` grow where the machine is shared
    (draft / "peer.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(draft, out)
    print(json.dumps(about))


def loss(folder: Path, ids: Tensor) -> float:
    """Mean negative log-likelihood, in nats per token, of the model of a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return sum(float(model(row[None], labels=row[None]).loss) for row in ids) / len(ids)


PEERS = {
    "gptqmodel": (gptqmodel, "gptqmodel"),
    "llmcompressor": (llmcompressor, "llmcompressor"),
    "autoround": (autoround, "auto-round"),
    "torchao": (torchao, "torchao"),
    "openvino": (openvino, "nncf"),
    "openvino16": (openvino16, "openvino"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=PEERS)
    parser.add_argument("folder", type=Path, help="the folder written by `prepare.py`")
    parser.add_argument("out", type=Path, help="the checkpoint becomes a folder in it")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=128, help="calibration windows, the first prepared ones")
    parser.add_argument("--iters", type=int, default=200, help="of AutoRound, per block")
    parser.add_argument("--lr", type=float, help="of AutoRound; 5e-3 in its light recipe of 50 iterations; of torchao")
    parser.add_argument("--updates", type=int, default=120, help="of torchao, of two windows each")
    parser.add_argument("--batch", type=int, default=8, help="windows in a step of AutoRound")
    parser.add_argument("--keep", action="store_true", help="keep the tool's own files in OUT/NAME/saved")
    options = parser.parse_args()
    make, package = PEERS[options.tool]
    ids = torch.load(options.folder / "calibration.pt")[: options.samples]
    name = options.tool if options.tool == "openvino16" else f"{options.tool}-w{BITS}g{options.group_size}"
    if options.tool == "torchao":
        name += f"-lr{options.lr or TORCHAO_RATE:g}"
    scratch = options.folder / f"{name}-saved"
    shutil.rmtree(scratch, ignore_errors=True)
    with torch.no_grad():
        peer = make(options.folder / "model", ids, scratch, options)
        peer.settings |= {"version": version(package), "samples": ids.shape[0], "seqlen": ids.shape[1]}
        peer.settings["threads"] = torch.get_num_threads()
        write(peer, options.folder / "model", options.out / name, ids[:CHECKED])
    if options.keep:
        shutil.move(scratch, options.out / name / "saved")
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
