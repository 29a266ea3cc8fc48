"""The KV cache: policies that choose the positions that stay, compressed storage, sparse reading, and the cache that
they act on.

>>> with attached(model, [METHODS["snapkv"](budget=0.25), METHODS["kv_int"](bits=4)]) as attachment:
...     model.generate(**inputs)
"""

from compress.kv.attach import Attachment, attach, attached, attachment_of, detach
from compress.kv.batched import CacheBatch
from compress.kv.cache import CompressedCache
from compress.kv.support import left_alone

__all__ = ["CacheBatch", "Attachment", "CompressedCache", "attach", "attached", "attachment_of", "detach", "left_alone"]
