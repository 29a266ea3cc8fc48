"""Turns a model into a smaller one.

>>> model, tokenizer = load_model("smollm2-135m")
>>> batches = calibration(tokenizer, corpus="c4", samples=128, seqlen=512)
>>> result = apply([METHODS["gptq"](bits=4, group_size=64)], model, batches)
>>> save_compressed(result, "out", tokenizer)
"""

from compress.activations.activations import Activations
from compress.activations.bnb_int8 import BitsandbytesInt8
from compress.activations.fp8 import FP8
from compress.activations.gather import Gather
from compress.activations.int8 import Int8
from compress.activations.llm_int8 import LLMInt8
from compress.activations.smoothquant import SmoothQuant
from compress.activations.teal import Teal
from compress.apply import apply
from compress.checkpoint import load_compressed, resize, save_compressed
from compress.correction.low_rank import LowRank
from compress.correction.outlier_entries import Outliers
from compress.correction.salient_signs import SalientSigns
from compress.correction.svdquant import SVDQuant
from compress.inputs.calibration import calibration, held_out
from compress.inputs.model import load_model
from compress.kv.eviction.d2o import D2O
from compress.kv.eviction.expected_attention import ExpectedAttention
from compress.kv.eviction.gemfilter import GemFilter
from compress.kv.eviction.h2o import H2O
from compress.kv.eviction.keydiff import KeyDiff
from compress.kv.eviction.knorm import KNorm
from compress.kv.eviction.kvzip import KVzip
from compress.kv.eviction.prefixkv import PrefixKV
from compress.kv.eviction.random_choice import RandomEviction
from compress.kv.eviction.snapkv import SnapKV
from compress.kv.eviction.streaming import Streaming
from compress.kv.eviction.tova import TOVA
from compress.kv.learned.kvzap import KVzap
from compress.kv.learned.locret import Locret
from compress.kv.projecting.matryoshka import Matryoshka
from compress.kv.projecting.xkv import XKV
from compress.kv.reading.quest import Quest
from compress.kv.reading.shadowkv import ShadowKV
from compress.kv.reading.tidaldecode import TidalDecode
from compress.kv.smoothing.smooth_keys import SmoothKeys
from compress.kv.storing.kv_fp8 import KVFloat8
from compress.kv.storing.kv_int import KVInt
from compress.kv.storing.zipvl import ZipVL
from compress.method import METHODS, Method
from compress.pruning.expert_drop import ExpertDrop
from compress.pruning.layer_drop import LayerDrop
from compress.pruning.layer_skip import LayerSkip
from compress.pruning.magnitude import Magnitude
from compress.pruning.random_choice import RandomChoice
from compress.pruning.sparsegpt import SparseGPT
from compress.pruning.wanda import Wanda
from compress.pruning.width import Width
from compress.recover.distil import Distil
from compress.result import Result
from compress.rotations.flatquant import FlatQuant
from compress.rotations.rotate import Rotate
from compress.search.fit import fit
from compress.search.wishes import Wishes
from compress.tuning.tune import Tune
from compress.walk.window import in_window
from compress.weights.any_precision import AnyPrecision
from compress.weights.awq import AWQ
from compress.weights.bitstack import BitStack
from compress.weights.bnb_nf4 import BitsandbytesNF4
from compress.weights.finequant import FineQuant
from compress.weights.gptaq import GPTAQ
from compress.weights.gptq import GPTQ
from compress.weights.mixed import Mixed
from compress.weights.nf4 import NF4
from compress.weights.qmoe import QMoE
from compress.weights.qtip import QTIP
from compress.weights.rtn import RTN
from compress.weights.squeezellm import SqueezeLLM
from compress.weights.svd import SVD
from kernels.step.accelerate import accelerate

METHODS |= {
    "rtn": RTN, "gptq": GPTQ, "gptaq": GPTAQ, "awq": AWQ, "nf4": NF4, "bnb_nf4": BitsandbytesNF4,
    "qtip": QTIP, "qmoe": QMoE, "squeezellm": SqueezeLLM, "any_precision": AnyPrecision, "bitstack": BitStack,
    "finequant": FineQuant, "svd": SVD, "mixed": Mixed, "tune": Tune, "distil": Distil,
    "magnitude": Magnitude, "random": RandomChoice, "wanda": Wanda, "sparsegpt": SparseGPT, "layer_drop": LayerDrop,
    "layer_skip": LayerSkip, "expert_drop": ExpertDrop,
    "width": Width,
    "low_rank": LowRank, "outlier_entries": Outliers, "salient_signs": SalientSigns,
    "rotate": Rotate, "flatquant": FlatQuant, "gather": Gather, "activations": Activations, "teal": Teal,
    "smoothquant": SmoothQuant, "int8": Int8, "fp8": FP8, "llm_int8": LLMInt8, "bnb_int8": BitsandbytesInt8,
    "random_kv": RandomEviction, "streaming": Streaming, "knorm": KNorm, "keydiff": KeyDiff, "h2o": H2O, "tova": TOVA,
    "snapkv": SnapKV, "gemfilter": GemFilter, "expected_attention": ExpectedAttention, "kvzip": KVzip, "kvzap": KVzap,
    "locret": Locret, "prefixkv": PrefixKV, "d2o": D2O,
    "svdquant": SVDQuant, "smooth_keys": SmoothKeys, "kv_int": KVInt, "kv_fp8": KVFloat8, "zipvl": ZipVL,
    "matryoshka": Matryoshka, "xkv": XKV, "quest": Quest, "tidaldecode": TidalDecode, "shadowkv": ShadowKV,
}  # fmt: skip

__all__ = [
    "METHODS", "Method", "Result", "Wishes", "accelerate", "apply", "calibration", "fit", "held_out", "in_window",
    "load_compressed", "load_model", "resize", "save_compressed",
]  # fmt: skip
