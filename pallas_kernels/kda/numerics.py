"""How far a decay may be bounded: what the exponent range of a dtype allows a score tile. Does not import JAX.

A tile of R rows forms all its scores as one product of scaled operands, q_i e^{G_i - r} and k_j e^{r - G_j}, with G the
sum of the gates up to a row and r the tile's reference point. With gates in [g_min, 0] nats the exponents span
(R - 1) |g_min| nats each way; the reference rule says how they lie around zero:

    rule      r                                          rows of later tokens      columns of later tokens   causal
    before    G before the first row                     [R g_min, 0]              [0, R |g_min|]            yes
    first     G of the first row                         [(R - 1) g_min, 0]        [0, (R - 1) |g_min|]      yes
    middle    G of row R / 2                             +- R/2 |g_min|            +- R/2 |g_min|            no
    shifted   G of the first row - (R - 1) |g_min| / 2   +- (R - 1) |g_min| / 2    +- (R - 1) |g_min| / 2    yes

A middle reference makes scores of earlier rows depend, in their last bits, on later gates (fla#1240). The kernels here
use `shifted`, and form e^{G_i - r} as e^{G_i - G_first} times a constant: their operands have the range of `shifted`,
their gates the limit of `first` (`lowest_kernel_gate`). Scores above the diagonal are the product of both factors and
may overflow: they are masked by select, never by multiplication.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

REFERENCES = ("before", "first", "middle", "shifted")


def exponent_range(dtype) -> float:
    """Whole nats x such that e^x and e^-x are normal numbers of a floating dtype: 87 for bfloat16 and float32."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    return float(math.floor(min(math.log(float(info.max)), -math.log(float(info.smallest_normal)))))


@dataclasses.dataclass(frozen=True)
class TileRange:
    """What the scaled operands of a tile span, for unit queries and keys.

    Attributes:
      row, col: lowest and highest exponent of the factors of rows and columns, in nats.
      largest: the largest scaled operand.
      smallest_entry: entries of q and k below it become subnormal or zero in some row, and lose even their scores with
        near tokens, which hardly decay.
      causal: rows do not depend on later gates.
      safe: all factors are normal numbers of the dtype.
    """

    row: tuple[float, float]
    col: tuple[float, float]
    largest: float
    smallest_entry: float
    causal: bool
    safe: bool


def tile_range(dtype, tile: int, reference: str, g_min: float) -> TileRange:
    """The range of a tile's scaled operands with gates in [g_min, 0].

    Args:
      dtype: of the scaled operands.
      tile: R, rows that share a reference point.
      reference: one of REFERENCES.
      g_min: lower bound of the log decay per token, in nats.

    Raises:
      ValueError: an unknown reference, a positive g_min, a tile without rows.
    """
    below, above = _spans(tile, reference)
    if g_min > 0:
        raise ValueError(f"g_min={g_min} is positive; log decays are <= 0, so pass the lower bound, e.g. -5.0")
    row = (-below * -g_min, above * -g_min)
    col = (-row[1], -row[0])
    lowest, highest = min(row[0], col[0]), max(row[1], col[1])
    info = ml_dtypes.finfo(np.dtype(dtype))
    return TileRange(
        row=row,
        col=col,
        largest=math.exp(highest) if highest < 709 else math.inf,
        smallest_entry=float(info.smallest_normal) * math.exp(-lowest) if lowest > -600 else math.inf,
        causal=reference != "middle",
        safe=max(highest, -lowest) <= exponent_range(dtype),
    )


def lowest_gate(dtype, tile: int, reference: str) -> float:
    """The lowest g_min whose factors stay normal numbers of a dtype, in nats per token; -inf for a tile of one row."""
    widest = max(_spans(tile, reference))
    return -exponent_range(dtype) / widest if widest else -math.inf


def lowest_kernel_gate(tile: int) -> float:
    """The lowest g_min that the chunked forms of this package take with tiles of that many rows: -5.8 with 16."""
    return lowest_gate("float32", tile, "first")


def _spans(tile: int, reference: str) -> tuple[float, float]:
    """How many gates lie at most between the reference point and a row after it, and a row before it."""
    if tile < 1:
        raise ValueError(f"tile={tile} has no rows; use 16")
    if reference not in REFERENCES:
        raise ValueError(f"reference={reference!r} does not exist; use one of: {', '.join(REFERENCES)}")
    half = (tile - 1) / 2
    return {
        "before": (float(tile), 0.0),
        "first": (2 * half, 0.0),
        "middle": (float((tile - 1) // 2), float(tile // 2)),
        "shifted": (half, half),
    }[reference]
