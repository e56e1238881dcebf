"""Multi-head latent attention: keys and values are products of one small latent for each token (DeepSeek-AI 2024).

Shapes, besides those of the network: L kv_rank, R rope_head_dim, N = C - R columns without rotation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from sheepop.model.attention.kernel import Attending, Score, absorbs
from sheepop.model.attention.layer import Attention, KeysValues
from sheepop.model.cache import Cache, LatentCache
from sheepop.model.config import ModelConfig
from sheepop.model.norms import build_norm
from sheepop.model.options import Heads
from sheepop.model.positions import Angles, rotated
from sheepop.model.probe import Probe


class LatentAttention(Attention):
    """Attention with the keys ``[k_R; W_K c]`` and the values ``W_V c`` of the latents c (DeepSeek-V2, section 2.1).

    The first R columns of a key are the same in all heads, and only these are rotated. Queries come from a latent of
    their own, or from the residual stream. A cache may hold c and the rotated k_R instead of keys and values.
    """

    k_proj: nn.Linear
    v_proj: nn.Linear

    def _add_projections(self, config: ModelConfig, heads: Heads) -> None:
        latent, count, width = config.latent_attention, config.num_heads, config.d_model
        assert latent is not None
        bias = bool(config.attention_bias)
        self.rope_dim, self.nope_dim = latent.rope_head_dim, config.head_size - latent.rope_head_dim
        self.scale = config.head_size**-0.5 if self.scale is None else self.scale
        if latent.q_rank is not None:
            self.q_latent_proj = nn.Linear(width, latent.q_rank, bias=bias)
            self.q_latent_norm = build_norm(config, latent.q_rank, latent.norm_eps)
            self.q_latent = Probe()
        self.q_proj = nn.Linear(latent.q_rank or width, count * heads.key_width, bias=False)
        self.kv_latent_proj = nn.Linear(width, latent.rope_head_dim + latent.kv_rank, bias=bias)
        self.kv_latent_norm = build_norm(config, latent.kv_rank, latent.norm_eps)
        self.k_proj = nn.Linear(latent.kv_rank, count * self.nope_dim, bias=False)
        self.v_proj = nn.Linear(latent.kv_rank, count * heads.value_width, bias=False)
        self.has_q_latent, self.kv_latent = latent.q_rank is not None, Probe()

    @property
    def stream_layers(self) -> tuple[nn.Linear, ...]:
        """The layers that read the residual stream."""
        return self.q_latent_proj if self.has_q_latent else self.q_proj, self.kv_latent_proj

    @property
    def whole_layers(self) -> tuple[nn.Module, ...]:
        """The layers that are not divided into heads."""
        own = (self.q_latent_proj, self.q_latent_norm) if self.has_q_latent else ()
        return *own, self.kv_latent_proj, self.kv_latent_norm

    def forward(
        self,
        x_BTD: Tensor,
        attending: Attending,
        rotary: Angles | None = None,
        cache: Cache | None = None,
        memory_BSD: Tensor | None = None,
        document_ids: Tensor | None = None,
        shared: KeysValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """See `Attention.forward`; raises `ValueError` if probes of keys or values are watched, and a cache has none.

        A cache that holds latents attends by `_attend_latents`.
        """
        if cache is None or not isinstance(cache, LatentCache):
            return super().forward(x_BTD, attending, rotary, cache, memory_BSD, document_ids)
        if self.k.observers or self.v.observers or self.rotated_k.observers:
            raise ValueError("the cache holds latents, not keys and values of heads; run the network without a cache")
        q_BHTC, k_B1TR, c_B1TL = self._latents(x_BTD)
        q_BHTC, k_B1TR = rotated(q_BHTC, rotary), rotated(k_B1TR, rotary)
        attend = partial(self._attend_latents, score=self._score())
        out_BHTC = cache.attend_latents(self.layer, attending, self.rotated_q(q_BHTC), k_B1TR, c_B1TL, attend)
        return self._output(x_BTD, out_BHTC)

    def _queries_keys_values(
        self, x_BTD: Tensor, document_ids: Tensor | None, cache: Cache | None, rotary: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTC, k_B1TR, c_B1TL = self._latents(x_BTD)
        k_BHTC, v_BHTC = self._expanded(k_B1TR, c_B1TL)
        return rotated(q_BHTC, rotary), rotated(self.k(k_BHTC), rotary), self.v(v_BHTC)

    def _latents(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, shared keys (B, 1, T, R) and latents (B, 1, T, L), all before rotation."""
        q_BTE, kv_BTE = self._projections(x_BTD)
        if self.has_q_latent:
            q_BTE = self.q_proj(self.q_latent(self.q_latent_norm(q_BTE).to(q_BTE.dtype)))
        k_BTR, c_BTL = kv_BTE.tensor_split([self.rope_dim], dim=-1)
        c_BTL = self.kv_latent(self.kv_latent_norm(c_BTL).to(k_BTR.dtype))
        return self._queries(q_BTE), k_BTR[:, None], c_BTL[:, None]

    def _expanded(self, k_B1SR: Tensor, c_B1SL: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all heads."""
        c_BSL = c_B1SL[:, 0]
        k_BHSN = self._heads(self.k_proj(c_BSL), None, self.nope_dim)
        k_BHSC = torch.cat((k_B1SR.expand(-1, k_BHSN.shape[1], -1, -1), k_BHSN), dim=-1)
        return k_BHSC, self._heads(self.v_proj(c_BSL), None, self.value_dim)

    def _attend_latents(
        self, attending: Attending, q_BHTC: Tensor, k_B1SR: Tensor, c_B1SL: Tensor, score: Score
    ) -> Tensor:
        """Attends to rotated shared keys and latents, (B, H, T, value_dim), in the form with fewer operations.

        Few queries are multiplied by W_K, then all heads attend to the latents, and their results are multiplied by
        W_V: ``q^T W_K c = (W_K^T q)^T c`` and ``sum a W_V c = W_V sum a c``. Many queries attend to expanded keys.
        """
        keys, rank = c_B1SL.shape[2:]
        if not absorbs(q_BHTC.shape[2], keys, (rank, self.nope_dim + self.value_dim)):
            return attending.attend(q_BHTC, *self._expanded(k_B1SR, c_B1SL), score)
        up_HNL, up_HCL = (
            torch.unflatten(_matrix(layer), 0, (q_BHTC.shape[1], -1)) for layer in (self.k_proj, self.v_proj)
        )
        rotary_BHTR, rest_BHTN = q_BHTC.tensor_split([self.rope_dim], dim=-1)
        q_BHTE = torch.cat((rotary_BHTR, rest_BHTN @ up_HNL), dim=-1)
        out_BHTL = attending.attend(q_BHTE, torch.cat((k_B1SR, c_B1SL), dim=-1), c_B1SL, score)
        return out_BHTL @ up_HCL.transpose(1, 2)


def _matrix(layer: nn.Linear) -> Tensor:
    """Returns the matrix of a linear layer without bias, of a layer with adapters by applying it to unit vectors."""
    if type(layer) is nn.Linear:
        return layer.weight
    return layer(torch.eye(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)).t()
