"""Trajectories to training rows: whole sequences packed into rows of one length, one shape of micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trillium_moe.rl.objectives import WEIGHTING
from trillium_moe.rl.trajectory import Part

PER_ROW = 32  # sequences that a row holds at most

Sequence_ = dict[str, np.ndarray]  # arrays of one length, see `sequences`


def sequence(part: Part, advantage_U: np.ndarray) -> Sequence_:
    """Inputs and targets of a part, one shorter than it: what stands at t is about the token at t + 1.

    Args:
      advantage_U: of every turn of the trajectory.
    """
    tokens, turn = np.array(part.tokens, np.int32), np.array(part.turn, np.int32)
    mask = np.array(part.mask, np.float32)
    # given tokens belong to the turn to come, which a trajectory that ended need not have
    advantage = np.concatenate([advantage_U, [0.0]])[np.minimum(turn, len(advantage_U))] * mask
    return {
        "tokens": tokens[:-1], "targets": tokens[1:], "mask": mask[1:],
        "sampler": np.array(part.logprob, np.float32)[1:], "advantage": advantage[1:].astype(np.float32),
    }  # fmt: skip


def weigh(sequences: Sequence[Sequence_], objective: str, longest: int) -> None:
    """Adds the objective's weight of every token, over all sequences of an update."""
    kind, S = WEIGHTING[objective], len(sequences)
    total = max(1.0, sum(float(s["mask"].sum()) for s in sequences))
    for s in sequences:
        own = max(1.0, float(s["mask"].sum()))
        weight = {"token": 1 / total, "sequence": 1 / (own * S), "constant": 1 / (longest * S), "whole": 1 / S}[kind]
        s["weight"] = (weight * s["mask"]).astype(np.float32)


def pack(sequences: Sequence[Sequence_], row: int, align: int = 1) -> list[list[Sequence_]]:
    """First fit, the longest first. Every sequence is in exactly one row, and begins there at a multiple of `align`."""
    rows: list[list[Sequence_]] = []
    room: list[int] = []
    for s in sorted(sequences, key=lambda s: -len(s["tokens"])):
        n = len(s["tokens"])
        assert n <= row, f"a sequence of {n} tokens does not fit a row of {row}"
        at = next((i for i, free in enumerate(room) if free >= n and len(rows[i]) < PER_ROW), None)
        if at is None:
            rows.append([])
            room.append(row)
            at = len(rows) - 1
        rows[at].append(s)
        room[at] -= -(-n // align) * align
    return rows


def micro_batches(
    sequences: Sequence[Sequence_], row: int, rows: int, align: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """Batches [rows, row] of all arrays, with segment_ids; the rest is padding. align: as of `pack`."""
    packed = pack(sequences, row, align)
    for start in range(0, len(packed), rows):
        out = {name: np.zeros((rows, row), x.dtype) for name, x in sequences[0].items()}
        out["segment_ids"] = np.zeros((rows, row), np.int32)
        for b, own in enumerate(packed[start : start + rows]):
            at = 0
            for i, s in enumerate(own):
                n = len(s["tokens"])
                for name, x in s.items():
                    out[name][b, at : at + n] = x
                out["segment_ids"][b, at : at + n] = i + 1
                at += -(-n // align) * align
        yield out
