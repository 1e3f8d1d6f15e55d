"""What a compiled program sends between devices: its collectives by kind, with loops multiplied out.

Read from the text of the optimised module. A `while` runs its body `known_trip_count` times. Of a conditional's
branches one runs at a time: the layer switch is weighted by how often the schedule takes each branch; of any other
conditional the costliest branch counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all", "all-to-all", "collective-permute",
         "collective-broadcast")
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32,
        "s32": 32, "u32": 32, "f64": 64, "s64": 64, "u64": 64, "c64": 64}


@dataclass(frozen=True)
class Traffic:
    """Of one kind and one device, in one step."""

    count: int | float = 0  # times it runs
    bytes: int | float = 0  # that the device sends, on a ring

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)

    def times(self, n: int | float) -> Traffic:
        return Traffic(self.count * n, self.bytes * n)


Traffics = dict[tuple[str, bool], Traffic]  # by (kind, whether a group spans slices)


def collectives(hlo: str, branch_shares: Sequence[float] = (), per_slice: int = 0) -> Traffics:
    """Traffic of one device by kind, and by whether it leaves the slice.

    Args:
      hlo: `compiled.as_text()`.
      branch_shares: share of each branch of conditionals with as many branches: how often the layer switch takes it.
      per_slice: devices of one slice, 0 for a single slice.
    """
    bodies = _computations(hlo)
    memo: dict[str, Traffics] = {}

    def of(name: str) -> Traffics:
        if name not in memo:
            memo[name] = {}
            total: Traffics = {}
            for line in bodies.get(name, ()):
                _add(total, _own(line, per_slice))
                _add(total, called(line))
            memo[name] = total
        return memo[name]

    def called(line: str) -> Traffics:
        if " while(" in line:
            body = re.search(r"body=%?([\w.\-]+)", line)[1]
            return {key: t.times(_trips(line, bodies)) for key, t in of(body).items()}
        if " conditional(" in line:
            names = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = names[1].split(",") if names else re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
            parts = [of(name.strip().lstrip("%")) for name in names]
            if len(parts) == len(branch_shares):
                out: Traffics = {}
                for part, share in zip(parts, branch_shares):
                    _add(out, {key: t.times(share) for key, t in part.items()})
                return out
            return max(parts, key=lambda part: sum(t.bytes for t in part.values()), default={})
        out = {}
        if " async-done(" in line or " async-update(" in line:
            return out  # counted where it started
        for name in re.findall(r"(?:calls|to_apply|async_execution_thread_computation)=%?([\w.\-]+)", line):
            _add(out, of(name))
        return out

    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    return of(entry[1]) if entry else {}


def _computations(hlo: str) -> dict[str, list[str]]:
    """Lines of every computation, by name."""
    out: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in hlo.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and "=" not in line.split("(")[0]:
            current = out.setdefault(head[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return out


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Trip count of a while loop: as noted by XLA, or the bound that its condition compares with (TPU)."""
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
    if known:
        return int(known[1])
    condition = bodies.get(re.search(r"condition=%?([\w.\-]+)", line)[1], [])
    bounds = [int(n) for text in condition for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)]
    return max(bounds, default=1)


def _own(line: str, per_slice: int) -> Traffics:
    """The traffic of one instruction, if it is a collective."""
    match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
    if not match:
        return {}
    kind, size = match[2], _bytes(match[1])
    group = _group(line)
    n = len(group) or 2
    if match[3] and match[1].startswith("("):  # the tuple has the operand, too
        size *= {"all-gather": n / (n + 1), "collective-permute": 1 / 2}.get(kind, 1)
    sent = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}.get(kind, (n - 1) / n)
    spans = bool(per_slice) and len({device // per_slice for device in group}) > 1
    return {(kind, spans): Traffic(1, size * sent)}


def _group(line: str) -> list[int]:
    """The first replica group of a collective."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])]
        group, stride = [0], math.prod(size for _, size in sizes)
        for name, size in sizes:
            stride //= size
            if f"'{name}'" in named[2]:
                group = [base + i * stride for base in group for i in range(size)]
        return group
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        ints = lambda text: [int(x) for x in text.split(",")]
        shape, dims = ints(iota[1]), ints(iota[2])
        order = ints(iota[3]) if iota[3] else list(range(len(dims)))
        strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
        group = []
        for flat in range(shape[-1]):
            device = 0
            for axis in reversed(order):
                flat, at = divmod(flat, dims[axis])
                device += at * strides[axis]
            group.append(device)
        return group
    explicit = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    return [int(x) for x in explicit[1].split(",")] if explicit else []


def _bytes(shapes: str) -> float:
    """Bytes of all arrays in a shape or a tuple of shapes."""
    total = 0.0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shapes):
        bits = BITS.get(kind, 8 if kind.startswith("f8") else 0)
        total += bits / 8 * math.prod(int(d) for d in dims.split(",") if d)
    return total


def _add(total: Traffics, more: Traffics) -> None:
    for key, traffic in more.items():
        total[key] = total.get(key, Traffic()) + traffic
