"""Every decision of a run as frozen dataclasses that check themselves.

An experiment is a file in `configs/` whose `get_config` returns these dataclasses as an `ml_collections.ConfigDict`
(`config_files.to_config_dict`), so that every field can be overridden from the command line
(`--config.train.steps=200`). `config_files.from_config_dict` turns the result back into dataclasses: an unknown key, a
value out of range or a conflict is one `ConfigError` that names the key, the value and the mend. `save_config` there
writes the resolved config into the run directory; `configs/from_run.py:DIR` repeats that run.

Zero, "" and () mean "off" or "chosen from the other fields", as each comment says: no field is ever None, so that
every override has a type.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.kda.config import ChunkConfig
from pallas_kernels.kda.numerics import lowest_kernel_gate

MIXERS = ("kda", "mla")
FFNS = ("dense", "moe")


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, the value and the mend, on one line."""


def check(ok: bool, key: str, value: Any, mend: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"config {key}={value!r}: {mend}")


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`, with the nearest one as a suggestion."""
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    check(value in choices, key, value, f"must be one of {', '.join(choices)}{hint}")


def check_positive(owner: str, config: Any, *names: str) -> None:
    """Raises ConfigError unless every named field is greater than zero."""
    for name in names:
        check(getattr(config, name) > 0, f"{owner}.{name}", getattr(config, name), "must be greater than 0")


@dataclass(frozen=True)
class DtypeConfig:
    """Dtype policy. Islands that stay at least float32 are fixed in the code, with their reason beside them."""

    param: str = "float32"  # master weights, gradients and optimizer state
    compute: str = "bfloat16"  # activations and matmul operands
    logits: str = "float32"  # output logits and the loss

    def __post_init__(self):
        for name in ("param", "compute", "logits"):
            check_choice(f"model.dtypes.{name}", getattr(self, name), ("float32", "bfloat16", "float64"))


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention: the linear-attention mixer (model.md 2.3)."""

    n_heads: int = 2
    head_dim: int = 32  # key and value width per head
    conv_size: int = 4  # taps of the causal depthwise convolution on q, k, v; 0 turns it off
    decay: str = "bounded"  # bounded: g = g_min sigmoid(e^A z); softplus: g = -e^A softplus(z) (Kimi Linear);
    # deep: as bounded, with a g_min beyond what the kernels' tiles can hold, computed as slowly as softplus
    decay_per: str = "channel"  # a decay for every channel of a head, or one for the head (an ablation)
    g_min: float = -5.0  # lower bound of the log decay per token, in nats (bounded and deep)
    decay_rank: int = 0  # rank of the decay projection; 0: head_dim
    gate: str = "full"  # output gate: full rank, low_rank, or none
    gate_rank: int = 0  # rank of the low_rank gate; 0: head_dim
    compute: str = ""  # between a layer's projections: "" as model.dtypes.compute, or float32, as decoding always does
    implementation: str = ""  # kernel: "" picks by platform, else reference | xla | pallas_tpu | pallas_gpu

    def __post_init__(self):
        check_positive("model.kda", self, "n_heads", "head_dim")
        check(self.conv_size >= 0, "model.kda.conv_size", self.conv_size, "must be 0 (off) or the number of taps")
        check_choice("model.kda.decay", self.decay, ("bounded", "softplus", "deep"))
        check_choice("model.kda.decay_per", self.decay_per, ("channel", "head"))
        check_choice("model.kda.gate", self.gate, ("full", "low_rank", "none"))
        check_choice("model.kda.compute", self.compute, ("", "float32"))
        check(self.g_min < 0, "model.kda.g_min", self.g_min, "must be negative: a log decay in nats, such as -5.0")
        tile, lowest = ChunkConfig().tile, lowest_kernel_gate(ChunkConfig().tile)
        check(self.decay != "bounded" or self.g_min >= lowest, "model.kda.g_min", self.g_min,
              f"must be at least {lowest:.2f}, or the decays of a {tile}-token tile leave the exponent range "
              "of bfloat16 and float32; use -5.0, or model.kda.decay='softplus' for unbounded decay")


@dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention (model.md 2.4)."""

    n_heads: int = 2
    q_lora_rank: int = 48  # rank of the query projection; 0: one full matrix (Kimi Linear)
    kv_lora_rank: int = 32  # width of the cached latent
    nope_dim: int = 32  # per-head query/key width taken from the latent
    rope_dim: int = 16  # per-head query width matched with the key part that all heads share
    v_dim: int = 32  # value width per head
    position: str = "none"  # none (NoPE) or rope, which rotates the rope_dim columns
    rope_theta: float = 10000.0  # base of the rotary frequencies (rope only)
    gate: str = "full"  # output gate: full or none
    compute: str = ""  # of attention: "" as model.dtypes.compute, or float32 (without kernels)
    implementation: str = ""  # attention: "" picks by platform, else reference | xla | pallas_gpu

    def __post_init__(self):
        check_positive("model.mla", self, "n_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim", "rope_theta")
        check(self.q_lora_rank >= 0, "model.mla.q_lora_rank", self.q_lora_rank, "must be 0 (full matrix) or a rank")
        check_choice("model.mla.position", self.position, ("none", "rope"))
        check_choice("model.mla.gate", self.gate, ("full", "none"))
        check_choice("model.mla.compute", self.compute, ("", "float32"))
        check(self.position == "none" or self.rope_dim % 2 == 0, "model.mla.rope_dim", self.rope_dim,
              "must be even when model.mla.position='rope'")


BALANCING = ("quantile", "quantile_exact", "load_quantile", "batch_threshold", "sign", "aux_loss", "none")


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE and its balancing (model.md 2.6, 2.8)."""

    n_experts: int = 16
    k: int = 4  # experts per token
    expert_dim: int = 48  # hidden width of one routed expert
    latent_dim: int = 64  # width the routed experts work in; 0: the model width, without latent projections
    latent_norm: bool = True  # RMSNorm between the weighted sum of experts and the up projection
    n_shared: int = 2  # shared experts, stored as one MLP of width n_shared * expert_dim; 0: none
    routed_scale: float = 1.0  # constant on the routed weights (2.446 in Kimi Linear)
    balancing: str = "quantile"
    # quantile         next bias = exact minimiser of the balancing dual, from a histogram of this step's margins
    # quantile_exact   the same from the exact order statistic of every micro-batch, averaged (one micro-batch: exact)
    # load_quantile    bias_e += load_eta * (quantile_{load_p}(load) - load_e), load in units of the mean load
    # batch_threshold  an expert takes the tokens whose score reaches its (1 - k/n) quantile over the batch.
    #                  NOT CAUSAL: a token's experts depend on later tokens. A control arm, never a language model.
    # sign             bias_e += sign_eta * sign(mean load - load_e)
    # aux_loss         aux_weight * n * sum_e f_e P_e, added to the gradient of the router only
    # none             no bias
    bins: int = 1000  # histogram bins over [min bias - 1, max bias + 1] (quantile)
    load_eta: float = 0.01  # step of load_quantile
    load_p: float = 0.5  # quantile of the loads that load_quantile steers to
    sign_eta: float = 1e-3  # step of sign
    aux_weight: float = 1e-2  # weight of aux_loss
    transport: str = ""  # tokens to experts of other devices: "" picks by platform, else padded | ragged
    capacity: float = 0.0  # rows a device has room for, in even shares; 0: the worst case, nothing is ever dropped
    record: int = 0  # tokens, the batch's first, whose experts are left in the statistics of a forward pass
    balance: str = ""  # rows of a device: "" those of its experts; exact: as many on each, by replicas of busy experts
    experts_format: str = "dense"  # routed experts in memory: dense, or mxfp4 (packed 4-bit weights; inference only)
    quantise: str = ""  # quantisation-aware training of routed experts: "" or mxfp4 (weights MXFP4, inputs MXFP8)
    implementation: str = ""  # expert kernels: "" picks by platform, else reference | xla | pallas_gpu | pallas_tpu
    router_implementation: str = ""  # router kernel: "" by platform, else reference | xla | pallas_gpu | pallas_tpu

    def __post_init__(self):
        check_positive("model.moe", self, "n_experts", "k", "expert_dim", "bins", "load_eta", "sign_eta")
        check(self.k < self.n_experts, "model.moe.k", self.k,
              f"must be less than model.moe.n_experts={self.n_experts}: quantile balancing needs the (k+1)-th score")
        check(self.latent_dim >= 0, "model.moe.latent_dim", self.latent_dim, "must be 0 (no latent) or a width")
        check(self.n_shared >= 0, "model.moe.n_shared", self.n_shared, "must be 0 or more")
        check_choice("model.moe.balancing", self.balancing, BALANCING)
        check_choice("model.moe.transport", self.transport, ("", "padded", "ragged"))
        check(self.record >= 0, "model.moe.record", self.record, "must be 0 (none) or a number of tokens")
        check_choice("model.moe.balance", self.balance, ("", "exact"))
        check(not (self.balance and self.capacity), "model.moe.capacity", self.capacity,
              "must be 0 with model.moe.balance='exact', which drops nothing")
        check(self.capacity == 0 or self.capacity >= 1, "model.moe.capacity", self.capacity,
              "must be 0 (the worst case) or at least 1 (the even share)")
        check_choice("model.moe.experts_format", self.experts_format, ("dense", "mxfp4"))
        check_choice("model.moe.quantise", self.quantise, ("", "mxfp4"))
        check(0 <= self.load_p <= 1, "model.moe.load_p", self.load_p, "must lie in [0, 1]")


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and its projector (model.md 2.9)."""

    n_layers: int = 0  # 0: a text model without any of this
    d_model: int = 64
    n_heads: int = 2
    head_dim: int = 32  # divisible by 4: pairs of channels turn by the column and by the row
    ffn_dim: int = 128  # hidden width of the MLP
    patch: int = 14  # pixels on a side; a feature, one token, stands for 2 x 2 patches
    grid: int = 16  # rows and columns of the learned position table, interpolated to every picture's own grid
    frames: int = 1  # most frames of a clip, which are averaged into one picture's tokens; 1: no clips
    pos_std: float = 1.0  # standard deviation of the position table at the start

    def __post_init__(self):
        check(self.n_layers >= 0, "model.vision.n_layers", self.n_layers, "must be 0 (text only) or more")
        check_positive("model.vision", self, "d_model", "n_heads", "head_dim", "ffn_dim", "patch", "grid", "frames",
                       "pos_std")
        check(self.head_dim % 4 == 0, "model.vision.head_dim", self.head_dim, "must be a multiple of 4")
        check(self.frames == 1 or self.d_model % 2 == 0, "model.vision.d_model", self.d_model,
              "must be even when model.vision.frames is above 1")

    @property
    def pixels(self) -> int:
        """Numbers in a patch."""
        return 3 * self.patch**2


@dataclass(frozen=True)
class ModelConfig:
    """The whole architecture. Defaults are the `tiny` scale."""

    vocab_size: int = 272  # 256 bytes and 16 special tokens
    d_model: int = 128
    n_layers: int = 9
    kda_per_mla: int = 3  # layers of KDA before each MLA layer; 0: every layer is MLA
    final_global: bool = True  # the last layer is MLA whatever the ratio says
    mla_layers: tuple[int, ...] = ()  # 0-based MLA layers, overriding the two fields above; (-1,): none
    n_dense_layers: int = 1  # leading layers with a dense FFN instead of the MoE
    ffn_dim: int = 384  # hidden width of the dense FFN
    activation: str = "situ"  # situ: b1 tanh(g/b1) sigmoid(g) * b2 tanh(u/b2); swiglu: silu(g) * u
    situ_beta: float = 4.0  # b1, cap of the gate
    situ_linear_beta: float = 25.0  # b2, cap of the linear part
    residual: str = "block"  # depth attention over block sums, over every sublayer (full), or plain sums (none)
    block_size: int = 4  # layers per residual block; with residual none: layers per rematerialised block
    norm_eps: float = 1e-5
    init_std: float = 0.02  # standard deviation of linear and embedding weights
    n_mtp: int = 0  # multi-token-prediction layers (0 or 1)
    mtp_weight: float = 0.3  # weight of the multi-token-prediction loss
    scan_layers: bool = True  # one compiled body for all layers; False unrolls them
    remat: str = "layer"  # saved for the backward: block sums, every running sum (layer), or everything (none)
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    dtypes: DtypeConfig = field(default_factory=DtypeConfig)

    def __post_init__(self):
        check_positive("model", self, "vocab_size", "d_model", "n_layers", "ffn_dim", "situ_beta", "situ_linear_beta",
                       "block_size", "norm_eps", "init_std")
        check(self.kda_per_mla >= 0, "model.kda_per_mla", self.kda_per_mla, "must be 0 or more")
        check(0 <= self.n_dense_layers <= self.n_layers, "model.n_dense_layers", self.n_dense_layers,
              f"must lie between 0 and model.n_layers={self.n_layers}")
        check_choice("model.activation", self.activation, ("situ", "swiglu"))
        check_choice("model.residual", self.residual, ("block", "full", "none"))
        check_choice("model.remat", self.remat, ("block", "layer", "none"))
        check(self.n_mtp in (0, 1), "model.n_mtp", self.n_mtp, "must be 0 or 1")
        if "mxfp4" in (self.moe.experts_format, self.moe.quantise):
            widths = {"expert_dim": self.moe.expert_dim, "latent_dim or model.d_model": self.expert_width}
            for name, width in widths.items():
                check(width % 32 == 0, f"model.moe.{name}", width, "must be a multiple of 32, the group of MXFP4, with "
                      "model.moe.quantise or experts_format mxfp4")
        bad = [i for i in self.mla_layers if i >= self.n_layers or i < -1]
        check(not bad, "model.mla_layers", self.mla_layers, f"layers {bad} do not exist; n_layers={self.n_layers}")

    @property
    def mixers(self) -> tuple[str, ...]:
        """Mixer kind of every layer."""
        if self.mla_layers:
            return tuple("mla" if i in self.mla_layers else "kda" for i in range(self.n_layers))
        last = self.n_layers - 1 if self.final_global else -1
        period = self.kda_per_mla + 1
        return tuple("mla" if i % period == period - 1 or i == last else "kda" for i in range(self.n_layers))

    @property
    def ffns(self) -> tuple[str, ...]:
        """FFN kind of every layer."""
        return tuple("dense" if i < self.n_dense_layers else "moe" for i in range(self.n_layers))

    @property
    def expert_width(self) -> int:
        """Width the routed experts work in."""
        return self.moe.latent_dim or self.d_model


KINDS = ("text", "long", "replay", "joined", "synthetic")  # of rows: `trillium_moe.data.mixture`


@dataclass(frozen=True)
class MixtureConfig:
    """Kinds of rows, as shares (any numbers: they are divided by their sum). Text alone: no mixture."""

    text: float = 1.0  # documents as they come
    long: float = 0.0  # documents and packages of at least half a window
    replay: float = 0.0  # rows of replay_window tokens, side by side
    joined: float = 0.0  # documents that see one another
    synthetic: float = 0.0  # long-dependency tasks
    before: tuple[float, ...] = ()  # the same five of the stage before, from which the shares move; (): none
    ramp: float = 0.1  # share of the run over which they move
    synthetic_from: float = 0.8  # share of the run before which there are no tasks, if there are other rows
    replay_window: int = 0  # tokens; 0: data.seq_len
    tasks: tuple[str, ...] = ("needle",)  # drawn from evenly: `trillium_moe.data.synthetic`
    split: float = 0.5  # share of the task rows that hold several shorter examples
    shortest: int = 128  # tokens of the shortest of them
    short_until: float = 0.0  # share of the run before which task rows hold the shortest examples only
    answer_weight: float = 1.0  # loss weight of an answer token; of the other tokens of a task it is 0

    def __post_init__(self):
        for name in (*KINDS, "ramp", "synthetic_from", "replay_window"):
            check(getattr(self, name) >= 0, f"data.mixture.{name}", getattr(self, name), "must be 0 or more")
        check(sum(getattr(self, k) for k in KINDS) > 0, "data.mixture.text", self.text, "one kind must be above 0")
        check(len(self.before) in (0, len(KINDS)) and min(self.before, default=0) >= 0
              and (not self.before or sum(self.before) > 0), "data.mixture.before", self.before,
              f"must be () or the shares of {', '.join(KINDS)}")
        check(self.ramp <= 1, "data.mixture.ramp", self.ramp, "must lie in [0, 1]")
        check(0 <= self.split <= 1, "data.mixture.split", self.split, "must lie in [0, 1]")
        for name in ("synthetic_from", "short_until"):
            check(0 <= getattr(self, name) <= 1, f"data.mixture.{name}", getattr(self, name), "must lie in [0, 1]")
        check(len(self.tasks) > 0, "data.mixture.tasks", self.tasks, "must name at least one task")
        check_positive("data.mixture", self, "answer_weight", "shortest")

    @property
    def on(self) -> bool:
        """Whether there is anything but text."""
        return any(getattr(self, kind) for kind in KINDS[1:]) or any(self.before[1:])


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it becomes [batch, seq_len] arrays."""

    source: str = "stdlib"  # stdlib: the running Python's own library source; text | arrayrecord | parquet: `path`
    path: str = ""  # file glob of the source, comma separated; not used by stdlib
    text_key: str = "text"  # column or JSON field that holds the text (parquet, arrayrecord)
    tokenizer: str = "byte"  # byte, bpe (trained on the source), or a tokenizer.json, tiktoken file or checkpoint
    bpe_vocab: int = 4096  # vocabulary of the trained BPE
    seq_len: int = 512  # tokens per row, the context window
    batch_size: int = 8  # rows per optimizer step, over all devices and micro-batches
    packing: str = "concat"  # concat: documents cut where a row ends; first_fit: whole documents, padded
    segments: bool = True  # keep packed documents apart; False lets a row attend across its documents
    heldout: float = 0.05  # share of the files (by a hash of their name) kept for evaluation
    mixture: MixtureConfig = field(default_factory=MixtureConfig)

    def __post_init__(self):
        check_choice("data.source", self.source, ("stdlib", "text", "arrayrecord", "parquet"))
        check(self.source == "stdlib" or self.path != "", "data.path", self.path,
              f"data.source={self.source!r} needs a file glob here")
        check_choice("data.packing", self.packing, ("concat", "first_fit"))
        check_positive("data", self, "seq_len", "batch_size", "bpe_vocab")
        check(0 < self.heldout < 1, "data.heldout", self.heldout, "must lie strictly between 0 and 1")


@dataclass(frozen=True)
class ImagesConfig:
    """Pictures in the stream: `share` of the rows hold them, from the first step to the last."""

    share: float = 0.0  # rows with pictures among all rows; 0: text alone
    tasks: str = "digits,shapes"  # what the pictures show, name or name:weight, as `trillium_moe.data.picture_tasks`
    path: str = ""  # captioned pictures: *.jsonl or *.parquet files (glob, comma separated), for `captions`, `folders`
    named: str = ""  # the same for the task `named`: pictures of single things and their names
    folds: int = 10  # parts that the pictures of files fall into
    fold: int = 0  # which of the parts is held out
    image_key: str = "image"  # field or column with the picture's file name (JSONL) or bytes (Parquet)
    text_key: str = "text"  # field or column with its caption
    patches: int = 512  # patches that a row has room for
    max_patches: int = 144  # of one picture; larger ones are scaled down
    blind: bool = False  # pictures are black: the control that reads the same texts and sees nothing
    eval_examples: int = 100  # held-out examples of each kind of question in an evaluation
    workers: int = 0  # processes that draw pictures ahead; 0: the training process does
    fonts: str = ""  # folder of *.ttf for rendered text; "": those that matplotlib brings

    def __post_init__(self):
        check(0 <= self.share < 1, "images.share", self.share, "must lie in [0, 1): the rest of the rows is text")
        check_positive("images", self, "patches", "max_patches", "eval_examples")
        check(self.folds > 1, "images.folds", self.folds, "must be 2 or more: one part of them is held out")
        check(0 <= self.fold < self.folds, "images.fold", self.fold,
              f"must be 0 to {self.folds - 1}: which of images.folds={self.folds} parts is held out")
        check(self.workers >= 0, "images.workers", self.workers, "must be 0 (none) or a number of processes")
        check(self.patches % 4 == 0, "images.patches", self.patches, "must be a multiple of 4, the patches of a token")
        check(4 <= self.max_patches <= self.patches, "images.max_patches", self.max_patches,
              f"must lie between 4 and images.patches={self.patches}")


@dataclass(frozen=True)
class OptimConfig:
    """Per-head Muon for matrices, AdamW for the rest (model.md 3.1, 3.2)."""

    name: str = "muon"  # muon, or adamw for every parameter
    lr: float = 5e-3  # peak learning rate; Muon updates are scaled to the RMS of AdamW's, so both share it
    schedule: str = "cosine"  # cosine, or wsd (warm-up, stable, decay)
    warmup: float = 0.01  # share of the steps that warm up linearly
    decay: float = 0.2  # share of the steps that decay at the end (wsd)
    final_lr: float = 0.1  # learning rate at the end, as a share of the peak
    begin: int = 0  # step at which the schedule begins (a stage that warms up again); before it the rate is its first
    horizon: int = 0  # step at which the schedule ends; 0: train.steps
    weight_decay: float = 0.1  # decoupled; not on norms, biases, decay parameters, convolutions, pseudo-queries
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
    momentum: float = 0.95  # Muon
    nesterov: bool = True  # Muon
    ns_steps: int = 5  # Newton-Schulz iterations (Muon)
    per_head: bool = True  # orthogonalise each head of q, k, v projections alone (Muon)
    update_rms: float = 0.2  # root mean square of a Muon update before the learning rate
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    qk_clip: float = 100.0  # largest attention logit a head may reach before its q, k weights shrink; 0: off

    def __post_init__(self):
        check_choice("optim.name", self.name, ("muon", "adamw"))
        check_choice("optim.schedule", self.schedule, ("cosine", "wsd"))
        check_positive("optim", self, "lr", "ns_steps", "update_rms", "eps")
        for name in ("warmup", "decay", "final_lr"):
            check(0 <= getattr(self, name) <= 1, f"optim.{name}", getattr(self, name), "must lie in [0, 1]")
        for name in ("momentum", "beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "must lie in [0, 1)")
        for name in ("weight_decay", "clip_norm", "qk_clip", "begin", "horizon"):
            check(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "must be 0 (off) or positive")


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are arranged: sizes of the mesh axes, whose product is the number of devices.

    What lies on which axis: `trillium_moe.parallel.sharding`. One size may be -1: the devices that the others leave.
    """

    replica: int = 1  # copies of parameters and optimizer, each with its part of the batch: slices on a slow network
    data: int = -1  # parameters, optimizer and batch cut into this many parts (FSDP)
    context: int = 1  # every sequence cut into this many parts
    expert: int = 1  # routed experts dealt to this many parts; outside the experts it cuts as data does
    model: int = 1  # heads, FFN widths and vocabulary cut into this many parts

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            check(size >= 1 or size == -1, f"mesh.{name}", size, "must be 1 or more, or -1 for the remaining devices")
        rest = [name for name, size in sizes.items() if size == -1]
        check(len(rest) < 2, f"mesh.{rest[-1] if rest else ''}", -1,
              f"only one axis can take the remaining devices; mesh.{rest[0] if rest else ''} is -1 too")


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run and what it writes."""

    steps: int = 300  # optimizer steps, those of the runs before this one included
    start: str = ""  # directory of a run whose newest state (all of it, and the step count) this one begins with
    first_step: int = 0  # steps that run had done
    micro_batches: int = 1  # gradient accumulation: each step's rows are processed in this many parts
    log_every: int = 10  # steps between metric lines
    eval_every: int = 100  # steps between held-out evaluations; 0: only at the end
    eval_batches: int = 8  # batches per held-out evaluation
    checkpoint_every: int = 100  # steps between checkpoints; 0: only at the end
    keep: int = 2  # newest checkpoints kept; 0: none are written, and a run that is stopped cannot be resumed
    sample_tokens: int = 256  # length of the text sample written at the end; 0: none
    alarm_violation: float = 4.0  # warn in the log when a layer's MaxVio (largest load / mean - 1) is above; 0: off
    alarm_dead: float = 0.1  # warn when a larger share of a layer's experts has under a tenth of the mean load; 0: off

    def __post_init__(self):
        check_positive("train", self, "steps", "micro_batches", "log_every", "eval_batches")
        check(0 <= self.first_step < self.steps, "train.first_step", self.first_step,
              f"must lie in [0, train.steps={self.steps})")
        check(self.start != "" or self.first_step == 0, "train.start", self.start,
              f"train.first_step={self.first_step} needs the run that did those steps")
        for name in ("keep", "eval_every", "checkpoint_every", "sample_tokens", "alarm_violation", "alarm_dead"):
            check(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "must be 0 or more")


@dataclass(frozen=True)
class Config:
    """One experiment."""

    name: str = "tiny-8k"  # shown in reports
    seed: int = 0  # of parameters, data order and everything random
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        check(self.data.batch_size % self.train.micro_batches == 0, "train.micro_batches", self.train.micro_batches,
              f"must divide data.batch_size={self.data.batch_size}")
        check(self.data.tokenizer != "byte" or self.model.vocab_size >= 272, "model.vocab_size", self.model.vocab_size,
              "data.tokenizer='byte' needs at least 272 (256 bytes and 16 special tokens)")
        check(self.data.tokenizer != "bpe" or self.model.vocab_size >= self.data.bpe_vocab, "model.vocab_size",
              self.model.vocab_size, f"must be at least data.bpe_vocab={self.data.bpe_vocab}")
        check(self.images.share == 0 or self.model.vision.n_layers > 0, "images.share", self.images.share,
              "a model without vision cannot read pictures; set model.vision.n_layers, or images.share=0")
