"""The axis legend, and the jaxtyping names the signatures use.

Names in mathematics carry their axes in this order, `q_BTHK` for a query tensor:

    B batch          T time (tokens)     D model width       H heads            K key width per head
    V value width    E experts           F FFN width         R latent width     L layers
    C chunk          N chunks or blocks  S segments, sources G groups of rows   M rows (tokens x experts per token)
    P patches of pictures

Logical axes of parameters, which the sharding table maps to mesh axes:

    layers    stacked layers of one kind          embed     model width                vocab   token ids
    heads     attention heads                     head_dim  width inside one head      rank    low-rank inner width
    mlp       hidden width of dense/shared FFNs   latent    width of the MoE latent    experts routed experts
    expert_mlp  hidden width of one expert        taps      convolution taps
    pixels    numbers of a patch                  rows, columns  of the vision tower's position table
    vision_heads, vision_mlp  heads and MLP width of the vision tower, which `model` does not cut
"""

from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

__all__ = ["Array", "Bool", "Float", "Int", "PyTree", "Shaped"]
