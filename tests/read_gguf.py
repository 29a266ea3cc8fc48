"""Logits of llama.cpp for a prompt: `python tests/read_gguf.py FILE.gguf '[5, 9, ...]' LOGITS.json`, by a Python that
imports llama_cpp, or the bindings of its fork ik_llama.cpp, which installs as a wheel."""

import json
import sys


def by_llama_cpp(file: str, ids: list[int]) -> list[list[float]]:
    import llama_cpp

    size = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 64}
    llm = llama_cpp.Llama(file, **size, n_threads=1, logits_all=True, verbose=False)
    llm.eval(ids)
    return llm.scores[: len(ids)].tolist()


def by_ik_llama_cpp(file: str, ids: list[int]) -> list[list[float]]:
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch

    model = IkModel(file)
    context, batch = IkContext(model, n_ctx=64, n_threads=1, flash_attn=False), make_batch(ids)
    for i in range(len(ids)):
        batch.logits[i] = 1
    if context.decode(batch):
        raise RuntimeError("ik_llama.cpp cannot decode this prompt")
    return [context.get_logits(i)[: model.n_vocab] for i in range(len(ids))]


file, ids, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
try:
    logits = by_llama_cpp(file, ids)
except ImportError:
    logits = by_ik_llama_cpp(file, ids)
with open(answer, "w") as out:
    json.dump(logits, out)
