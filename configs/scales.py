"""Model scales, from two CPU cores to the released 2.78T. Counts are those of `experiments.params`."""

from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig


def tiny() -> ModelConfig:
    """2.2M parameters: every schedule rule occurs; two CPU cores train it in minutes, in float32."""
    return ModelConfig(dtypes=DtypeConfig(compute="float32"))


def small() -> ModelConfig:
    """About 30M parameters."""
    return ModelConfig(
        vocab_size=4096, d_model=384, n_layers=13, ffn_dim=1024, block_size=4,
        kda=KDAConfig(n_heads=6, head_dim=64),
        mla=MLAConfig(n_heads=6, q_lora_rank=128, kv_lora_rank=64, nope_dim=64, rope_dim=32, v_dim=64),
        moe=MoEConfig(n_experts=32, k=4, expert_dim=64, latent_dim=192, n_shared=2),
    )  # fmt: skip


def medium() -> ModelConfig:
    """About 0.4B parameters, 0.1B active."""
    return ModelConfig(
        vocab_size=16_384, d_model=768, n_layers=17, ffn_dim=3072, block_size=4, remat="block",
        kda=KDAConfig(n_heads=6, head_dim=128),
        mla=MLAConfig(n_heads=6, q_lora_rank=256, kv_lora_rank=128, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(n_experts=64, k=6, expert_dim=256, latent_dim=384, n_shared=2),
    )  # fmt: skip


def large() -> ModelConfig:
    """2-3B parameters, 0.3-0.4B active."""
    return ModelConfig(
        vocab_size=32_768, d_model=1024, n_layers=21, ffn_dim=4096, block_size=6, remat="block",
        kda=KDAConfig(n_heads=8, head_dim=128),
        mla=MLAConfig(n_heads=8, q_lora_rank=384, kv_lora_rank=256, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(n_experts=128, k=8, expert_dim=512, latent_dim=512, n_shared=2),
    )  # fmt: skip


def kimi_linear_48b() -> ModelConfig:
    """Kimi-Linear-48B-A3B as released: softplus decay, low-rank gate, no latent, no attention residuals."""
    return ModelConfig(
        vocab_size=163_840, d_model=2304, n_layers=27, ffn_dim=9216, activation="swiglu", residual="none", block_size=4,
        remat="block",
        kda=KDAConfig(n_heads=32, head_dim=128, decay="softplus", gate="low_rank"),
        mla=MLAConfig(n_heads=32, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, gate="none"),
        moe=MoEConfig(n_experts=256, k=8, expert_dim=1024, latent_dim=0, n_shared=1, routed_scale=2.446),
    )  # fmt: skip


def trillium_2t8() -> ModelConfig:
    """The released dimensions of Kimi K3: 2.78T parameters, 104.2B active."""
    return ModelConfig(
        vocab_size=163_840, d_model=7168, n_layers=93, ffn_dim=33_792, block_size=12, remat="block",
        kda=KDAConfig(n_heads=96, head_dim=128),
        mla=MLAConfig(n_heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(n_experts=896, k=16, expert_dim=3072, latent_dim=3584, n_shared=2),
    )  # fmt: skip


SCALES = {f.__name__: f for f in (tiny, small, medium, large, kimi_linear_48b, trillium_2t8)}

# peak learning rate and rows per step at shrink=1 of each scale's pre-training run
RECIPES = {
    "tiny": (5e-3, 4),
    "small": (3e-3, 32),
    "medium": (2e-3, 128),
    "large": (1.4e-3, 512),
    "kimi_linear_48b": (1.1e-3, 512),
    "trillium_2t8": (2e-4, 512),
}

