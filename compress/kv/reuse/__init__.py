"""Caches of texts that are read once and combined for many prompts, as in retrieval.

>>> store = ChunkStore(model, prefix=tokenizer(system, return_tensors="pt").input_ids)
>>> chunks = [store.prefix, *(store.read(ids) for ids in documents)]
>>> blended = blend(model, chunks, question, share=0.15)
>>> blended.logits, blended.cache

Texts that were read in an earlier prompt have seen other texts, and need less to be computed again:

>>> store.read_together(documents)
>>> blended = blend(model, store.select(documents[::-1]), question, share=0.15, choose="context")
"""

from compress.kv.reuse.blend import Blended, blend
from compress.kv.reuse.chunks import Chunk, ChunkStore

__all__ = ["Blended", "Chunk", "ChunkStore", "blend"]
