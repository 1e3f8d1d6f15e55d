"""MoonViT-V2 and its projector: pictures of any size, packed side by side, into features of the language model.

A row holds a fixed number of patches P, whatever pictures it has: those of one picture stand together, frame by frame,
and inside a frame the four patches of each 2 x 2 neighbourhood stand together, neighbourhoods row by row. So four
consecutive patches make one feature, one token. Pictures see nothing of one another: attention is masked by sample.

    patches -> linear + interpolated positions -> pre-norm layers, 2-D rotary, bidirectional -> norm
            -> mean over frames -> 2 x 2 patches side by side -> linear, GELU, linear, norm

Source: model.md 2.9 (the released MoonViT-V2; Kimi K3, arXiv 2607.24653, section 2.4). Linear maps have no biases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import linear, normal, ones, param, stack, wide, wide_dtype
from trillium_moe.parallel import sharding
from trillium_moe.parallel.mesh import BATCH
from trillium_moe.shapes import Array, Float, Int, Shaped

# the released norms leave eps to PyTorch, which takes the epsilon of the type it computes in, also for bfloat16 input
NORM_EPS = float(np.finfo(np.float32).eps)
PROJECTOR_EPS = 1e-5
TIME_BASE = ROPE_BASE = 10_000.0
CHUNK = 512  # queries at once: bounds the scores of a row to CHUNK x P per head

# columns of `place`
SAMPLE, ROW, COLUMN, HEIGHT, WIDTH, FRAME, FRAMES = range(7)


class Images(NamedTuple):
    """The pictures of a batch. Pytree fields are untyped: arrays or shapes.

    patches: [B, P, 3 patch^2], uint8 pixels or floats in [-1, 1]; channels, then rows, then columns of a patch.
    place: [B, P, 7] int32: sample (0: nothing there), row and column of the patch, height and width of the picture in
      patches, frame, number of frames.
    features: [B, T] int32: 0 for a text token, else 1 + the number of the feature that stands in its place.
    """

    patches: Any
    place: Any
    features: Any


def images_of(batch: dict[str, Any]) -> Images | None:
    """The pictures of a batch, or None if its rows have no room for any."""
    return Images(batch["patches"], batch["place"], batch["features"]) if "patches" in batch else None


def interpolated(table_GGD: Float[Array, "G G D"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B P D"]:
    """The position table, bilinearly resized to each picture's grid (corners not aligned), at every patch.

    At the table's own size this is the table, bit for bit.
    """
    table_GGD = wide(table_GGD)
    G = table_GGD.shape[0]

    def between(at, size):
        """Table rows on both sides, and how far the second one counts."""
        size = jnp.maximum(size, 1).astype(table_GGD.dtype)
        source = jnp.maximum((at + 0.5) * (G / size) - 0.5, 0)
        low = jnp.minimum(jnp.floor(source).astype(jnp.int32), G - 1)
        return low, jnp.minimum(low + 1, G - 1), (source - low)[..., None]

    top, bottom, down = between(place_BP[..., ROW], place_BP[..., HEIGHT])
    left, right, across = between(place_BP[..., COLUMN], place_BP[..., WIDTH])
    line = lambda row: table_GGD[row, left] * (1 - across) + table_GGD[row, right] * across
    return line(top) * (1 - down) + line(bottom) * down


def frame_embedding(place_BP: Int[Array, "B P 7"], width: int, dtype: Any) -> Float[Array, "B P D"]:
    """Fixed sines then cosines of the frame's number; zeros for pictures, which have one frame."""
    half = width // 2
    rate = TIME_BASE ** (-jnp.arange(half, dtype=dtype) / half)
    angle = place_BP[..., FRAME, None].astype(dtype) * rate
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return jnp.where(place_BP[..., FRAMES, None] > 1, waves, 0)


def rotation(place_BP: Int[Array, "B P 7"], head_dim: int, dtype: Any) -> Float[Array, "B P pairs"]:
    """Angles of the channel pairs (2p, 2p + 1): even pairs turn by the column, odd ones by the row."""
    rate = ROPE_BASE ** (-4 * jnp.arange(head_dim // 4, dtype=dtype) / head_dim)
    angles = place_BP[..., (COLUMN, ROW)].astype(dtype)[..., None, :] * rate[:, None]
    return angles.reshape(*angles.shape[:2], -1)


def rotate_pairs(x_BPHK: Float[Array, "B P H K"], angle_BPK: Float[Array, "B P pairs"]) -> Float[Array, "B P H K"]:
    """Turns neighbouring channels as complex numbers, in at least float32."""
    a, b = wide(x_BPHK)[..., ::2], wide(x_BPHK)[..., 1::2]
    cos, sin = jnp.cos(angle_BPK)[:, :, None], jnp.sin(angle_BPK)[:, :, None]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x_BPHK.shape).astype(x_BPHK.dtype)


def attention(
    q_BPHK: Float[Array, "B P H K"],
    k_BPHK: Float[Array, "B P H K"],
    v_BPHK: Float[Array, "B P H K"],
    sample_BP: Int[Array, "B P"],
) -> Float[Array, "B P H K"]:
    """Softmax attention among the patches of the same sample, `CHUNK` queries at a time, recomputed in the backward."""
    mesh = sharding.current_mesh()
    context = mesh.shape["context"] if mesh else 1
    B, P = sample_BP.shape
    n_chunks = max(1, -(-P // (CHUNK * context)))
    while (P // context) % n_chunks:
        n_chunks += 1
    # a large picture is cut over `context`: its queries stay where they are, its keys come together
    whole = lambda x: sharding.constrain(x, sharding.P(BATCH))
    k_BPHK, v_BPHK, samples = whole(k_BPHK), whole(v_BPHK), whole(sample_BP)

    @jax.checkpoint
    def some(q, sample):
        scores = jnp.einsum("b...qhk,bphk->b...hqp", q, k_BPHK, preferred_element_type=wide_dtype(q))
        keys = samples.reshape(B, *(1,) * (sample.ndim - 1), P)
        seen = (sample[..., None] == keys)[..., None, :, :]
        weights = jax.nn.softmax(jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf), axis=-1)
        return jnp.einsum("b...hqp,bphk->b...qhk", weights.astype(q.dtype), v_BPHK)

    if n_chunks == 1:
        return some(q_BPHK, sample_BP)

    def split(x):
        # [B,P] -> [chunk,B,context,p]: every device chunks its own queries
        x = jnp.moveaxis(x.reshape(B, context, n_chunks, -1, *x.shape[2:]), 2, 0)
        return sharding.constrain(x, sharding.P(None, BATCH, "context"))

    out = jax.lax.map(lambda xs: some(*xs), (split(q_BPHK), split(sample_BP)))
    return jnp.moveaxis(out, 0, 2).reshape(q_BPHK.shape)


def pool_frames(x_BPD: Float[Array, "B P D"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B P D"]:
    """Mean over the frames of a clip, in the place of its first frame; the places of the others become zero."""
    B, P, D = x_BPD.shape
    frames = jnp.maximum(place_BP[..., FRAMES], 1)
    first = jnp.arange(P) - place_BP[..., FRAME] * place_BP[..., HEIGHT] * place_BP[..., WIDTH]
    share = wide(x_BPD) / frames[..., None]
    pooled = jnp.zeros_like(share).at[jnp.arange(B)[:, None], first].add(share)
    return pooled.astype(x_BPD.dtype)


def _uniform_std(n_in: int) -> float:
    """Standard deviation of PyTorch's default initialisation of linear maps and convolutions."""
    return (3 * n_in) ** -0.5


def _truncated(n_in: int):
    """Normal, cut at two standard deviations, of standard deviation sqrt(2 / n_in) before the cut."""
    return lambda key, shape, dtype: (2 / n_in) ** 0.5 * jax.random.truncated_normal(key, -2, 2, shape, dtype)


class Block(nnx.Module):
    """x += wo attention(norm0 x); x += fc1 gelu(fc0(norm1 x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, dtype, self.config = config.vision, config.dtypes.param, config
        D, H, K, F = c.d_model, c.n_heads, c.head_dim, c.ffn_dim
        heads = ("vision_heads", "head_dim")  # not cut over `model`: 12 heads fit few sizes of it
        self.norm0 = param(rngs, (D,), ("embed",), dtype, ones)
        self.norm1 = param(rngs, (D,), ("embed",), dtype, ones)
        for name in ("wq", "wk", "wv"):  # the released wqkv, in this order
            setattr(self, name, param(rngs, (D, H, K), ("embed", *heads), dtype, normal(_uniform_std(D)), muon="whole"))
        self.wo = param(rngs, (H, K, D), (*heads, "embed"), dtype, normal(_uniform_std(H * K)), muon="whole", n_in=2)
        self.fc0 = param(rngs, (D, F), ("embed", "vision_mlp"), dtype, _truncated(D), muon="whole")
        self.fc1 = param(rngs, (F, D), ("vision_mlp", "embed"), dtype, _truncated(F), muon="whole")

    def __call__(self, x_BPD, angle_BPK, sample_BP):
        x = rms_norm(x_BPD, self.norm0[...], NORM_EPS)
        q, k, v = (jnp.einsum("bpd,dhk->bphk", x, w.astype(x.dtype)) for w in (self.wq, self.wk, self.wv))
        o = attention(rotate_pairs(q, angle_BPK), rotate_pairs(k, angle_BPK), v, sample_BP)
        x = x_BPD + jnp.einsum("bphk,hkd->bpd", o, self.wo.astype(o.dtype))
        hidden = linear(rms_norm(x, self.norm1[...], NORM_EPS), self.fc0)
        return x + linear(jax.nn.gelu(hidden, approximate=True), self.fc1)


class Projector(nnx.Module):
    """Four patches side by side to one feature: norm(fc2 gelu(fc0 x)), the exact GELU."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        W, D, dtype = 4 * config.vision.d_model, config.d_model, config.dtypes.param
        self.fc0 = param(rngs, (W, W), ("embed", "vision_mlp"), dtype, _truncated(W), muon="whole")
        self.fc2 = param(rngs, (W, D), ("vision_mlp", "embed"), dtype, _truncated(W), muon="whole")
        # features begin as large as token embeddings, or they would drown what the first layers add to them
        start = lambda key, shape, dtype: config.init_std * ones(key, shape, dtype)
        self.post_norm = param(rngs, (D,), ("embed",), dtype, start)

    def __call__(self, merged: Float[Array, "B N W"]) -> Float[Array, "B N D"]:
        y = linear(jax.nn.gelu(linear(merged, self.fc0), approximate=False), self.fc2)
        return rms_norm(y, self.post_norm[...], PROJECTOR_EPS)


class Vision(nnx.Module):
    """The tower and the projector. Layers are stacked on a leading axis and scanned, like the language model's."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, dtype, self.config = config.vision, config.dtypes.param, config
        G, D = c.grid, c.d_model
        self.patch_embed = param(rngs, (c.pixels, D), ("pixels", "embed"), dtype, normal(_uniform_std(c.pixels)),
                                 muon="whole")
        self.pos_emb = param(rngs, (G, G, D), ("rows", "columns", "embed"), dtype, normal(c.pos_std))
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), c.n_layers, rngs)
        self.final_norm = param(rngs, (D,), ("embed",), dtype, ones)
        self.projector = Projector(config, rngs=rngs)

    def embed(self, patches_BP: Shaped[Array, "B P pixels"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B P D"]:
        """Patches in the tower's width, with their positions."""
        c, dtype = self.config.vision, self.config.dtypes.compute
        if jnp.issubdtype(patches_BP.dtype, jnp.integer):
            patches_BP = patches_BP.astype(wide_dtype(jnp.zeros((), dtype))) / 127.5 - 1  # mean and deviation 0.5
        x = wide(linear(patches_BP.astype(dtype), sharding.gathered_variable(self.patch_embed, dtype)))
        x = x + interpolated(sharding.gathered_variable(self.pos_emb, dtype)[...], place_BP)
        if c.frames > 1:
            x = x + frame_embedding(place_BP, c.d_model, x.dtype)
        return self.place(x.astype(dtype))

    def place(self, x_BPD: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        return sharding.constrain(x_BPD, sharding.P(BATCH, "context"))

    def encode(self, x_BPD: Float[Array, "B P D"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B P D"]:
        """All layers and the final norm."""
        dtype = self.config.dtypes.compute
        graphdef, layers = nnx.split(self.blocks)
        angle = rotation(place_BP, self.config.vision.head_dim, wide_dtype(x_BPD))

        def run(x, params):
            block = nnx.merge(graphdef, sharding.gathered(params, dtype))
            return self.place(block(x, angle, place_BP[..., SAMPLE]))

        run = run if self.config.remat == "none" else jax.checkpoint(run)
        if self.config.scan_layers:
            x_BPD, _ = jax.lax.scan(lambda x, params: (run(x, params), None), x_BPD, layers)
        else:
            for i in range(self.config.vision.n_layers):
                x_BPD = run(x_BPD, jax.tree.map(lambda w, i=i: w[i], layers))
        return rms_norm(x_BPD, self.final_norm[...], NORM_EPS)

    def merge(self, x_BPD: Float[Array, "B P D"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B N W"]:
        """Frames averaged, then four patches side by side."""
        if self.config.vision.frames > 1:
            x_BPD = pool_frames(x_BPD, place_BP)
        return x_BPD.reshape(x_BPD.shape[0], -1, 4 * x_BPD.shape[-1])

    def __call__(self, patches_BP: Shaped[Array, "B P pixels"], place_BP: Int[Array, "B P 7"]) -> Float[Array, "B N D"]:
        """One feature for every four patches; of a clip those of its first frame are its features."""
        x = self.encode(self.embed(patches_BP, place_BP), place_BP)
        return self.project(self.merge(x, place_BP))

    def project(self, merged: Float[Array, "B N W"]) -> Float[Array, "B N D"]:
        graphdef, params = nnx.split(self.projector)
        return nnx.merge(graphdef, sharding.gathered(params, self.config.dtypes.compute))(merged)

    def insert(self, x_BTD: Float[Array, "B T D"], images: Images) -> Float[Array, "B T D"]:
        """Token embeddings, those of placeholders replaced by features."""
        features = sharding.constrain(self(images.patches, images.place), sharding.P(BATCH))
        at = jnp.maximum(images.features - 1, 0)[..., None]
        found = jnp.take_along_axis(features, at, axis=1).astype(x_BTD.dtype)
        return sharding.activations(jnp.where(images.features[..., None] > 0, found, x_BTD))
