"""GGUF, the file format of llama.cpp: block types, names and layouts of weights, tokenizers, and the writer.

Every linear is written in the smallest type that holds its codes without a change, tensor by tensor:

    codes                                         type            bits per weight
    4-bit floats times powers of two: mxfp4       MXFP4           4.25
    2, 3 and 4 bits symmetric; 2 and 3 bits not   Q4_0            4.5
    a table of 16 values, that of the type        IQ4_NL          4.5
    4 bits asymmetric                             Q4_1            5.0
    5 bits; other 4-bit tables of integers        Q5_0, Q5_1      5.5, 6.0
    6 and 8 bits symmetric, int8 per channel      Q8_0            8.5
    anything else, and what was not compressed    F16, BF16, F32  16, 32

Groups of 64, 128, ... columns and whole rows repeat their scale in every block of 32. Groups that are no multiple of
32, other tables, 8-bit floats and sums of parts become floats: `verify` reports their number and size. GGUF keeps
scales and offsets in 16-bit floats; if that changes a weight by more than 2^-10 of the range of its block (scales
beyond the range of such floats), the next type without such a change is taken. Scales may be negative: llama.cpp's
products support them, and its own quantiser makes such scales for Q4_0 and Q5_0. Weights that were pruned go only into
types in which their zeros stay zeros.
"""

from compress.checkpoint.gguf.save_format import GGUF

__all__ = ["GGUF"]
