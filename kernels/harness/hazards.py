"""Two faults of compiled kernels: registers that are rewritten while a matrix product still reads them, found in PTX
and in machine code, and reductions that mix rows, found in Triton's layouts.

wgmma runs asynchronously while the warps continue. Its left operand may be in registers, which must not be written
until a `wait_group` has waited for the product (PTX ISA, `wgmma.wait_group`). In a pipelined loop, Triton lets such a
product continue into the next iteration, which writes the same registers: triton-lang/triton, issue 9433. Pull request
9514, which fixes this, is in 3.7, but the PTX of 3.7.1 for `acc = tl.dot(w, x, acc)` with w from registers still has
the fault.
"""

import json
import re

_PRODUCT = re.compile(r"wgmma\.mma_async\.\S+\s+\{[^}]*\},\s*\{([^}]*)\}")  # second braces: registers of the left
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")
_LABEL = re.compile(r"^\s*(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_WRITES = re.compile(r"^\s*(?:@!?%\w+\s+)?(?!st\.|red\.|bra|wgmma)[a-z][\w.:]*\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*,")
_REGISTER = re.compile(r"%\w+")


def rewritten_in_flight(ptx: str) -> list[str]:
    """Registers of left operands that a later iteration of the loop writes before the wait for their product."""
    lines = [statement for line in ptx.splitlines() for statement in line.partition("//")[0].split(";")]
    places = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    back = [
        (places[match[1]], i)
        for i, line in enumerate(lines)
        if (match := _BRANCH.search(line)) and places.get(match[1], i) < i
    ]
    found = []
    for i, line in enumerate(lines):
        around = [loop for loop in back if loop[0] < i < loop[1]]
        if (match := _PRODUCT.search(line)) and around:
            start, end = max(around)  # the innermost
            found += _written(set(_REGISTER.findall(match[1])), [*lines[i + 1 : end], *lines[start:i]])
    return sorted(set(found))


def _written(registers: set[str], ahead: list[str]) -> list[str]:
    """The registers written before the wait; `ahead`: the statements after a product, once around the loop."""
    committed = 0
    for line in ahead:
        if "wgmma.commit_group" in line:
            committed += 1
        elif (match := _WAIT.search(line)) and int(match[1]) < committed:
            return []
        elif (match := _WRITES.match(line)) and (hit := registers & set(_REGISTER.findall(match[1]))):
            return sorted(hit)
    return []


_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*)")
_LABEL_SASS = re.compile(r"^(\.L_x_\d+):")
_WIDE = {"LDS.128": 4, "LDG.E.128": 4, "LDS.64": 2, "LDG.E.64": 2, "IMAD.WIDE": 2, "IMAD.WIDE.U32": 2}


def overwritten_in_flight(listing: str) -> list[str]:
    """The same in machine code listed by nvdisasm: registers of left operands (R72 and the three after it in
    `HGMMA R24, R72, gdesc[UR4], R24`) that are written before the wait for the product's group (`gsb0` ends a group).

    The search covers the loops that contain products, in the order of their instructions, once around.
    """
    lines = listing.splitlines()
    places = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL_SASS.match(line))}
    found: set[str] = set()
    for i, line in enumerate(lines):
        match = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if match and places.get(match[1], i) < i:
            body = [_LINE.match(one) for one in lines[places[match[1]] : i + 1]]
            found |= _overwritten([(m[1], m[2]) for m in body if m])
    return sorted(found)


def _overwritten(body: list[tuple[str, str]]) -> set[str]:
    found: set[str] = set()
    for i, (mnemonic, operands) in enumerate(body):
        left = re.match(r"R\d+, R(\d+)", operands) if mnemonic.startswith("HGMMA") else None
        if left is None:
            continue
        held, groups = set(range(int(left[1]), int(left[1]) + 4)), "gsb0" in operands
        for mnemonic, operands in [*body[i + 1 :], *body[:i]]:
            if mnemonic.startswith("HGMMA"):
                groups += "gsb0" in operands
            elif mnemonic.startswith("WARPGROUP.DEPBAR"):
                if int(operands.rpartition(",")[2], 16) < groups:
                    break
            elif (target := re.match(r"R(\d+)\b", operands)) and not mnemonic.startswith(("ST", "RED", "BAR", "BRA")):
                written = range(int(target[1]), int(target[1]) + _WIDE.get(mnemonic, 1))
                found |= {f"R{r}" for r in held & set(written)}
    return found


_LAYOUT = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp = ", re.M)
_REDUCED = re.compile(
    r'"tt\.(?:reduce|scan)"\(.*?<\{axis = (\d+) : i32.*?^\s*\}\) : \(tensor<[^,>]*?, (.*?)>[,)]', re.M | re.S
)
_SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}$")


def mixed_rows(ttgir: str) -> list[str]:
    """Reductions along an axis whose lanes are not neighbours in a warp, as "axis 1 of #linear: lanes 0, 2, 3".

    Triton 3.6 and 3.7 shuffle among the next 2, 4, 8, ... lanes from the first lane of the axis on. In a linear layout,
    which arises from a `permute` and a `reshape` that joins two dimensions, lanes between them can belong to another
    row, whose values would be mixed in.
    """
    lanes = {name: json.loads(bases) for name, bases in _LAYOUT.findall(ttgir)}
    found = []
    for axis, layout in _REDUCED.findall(ttgir):
        dimensions, name = [], layout
        while match := _SLICE.match(name.rstrip(">")):
            dimensions.append(int(match[1]))
            name = match[2]
        bases = [list(base) for base in lanes.get(name.strip(), ())]
        for dimension in reversed(dimensions):
            for base in bases:
                del base[dimension]
        held = [i for i, base in enumerate(bases) if base[int(axis)]]
        if held and held[-1] - held[0] >= len(held):
            found.append(f"axis {axis} of {name}: lanes {', '.join(map(str, held))}")
    return found
