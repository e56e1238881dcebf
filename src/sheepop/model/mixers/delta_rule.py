"""The gated delta rule: a state that forgets, and learns to answer each key with its value (Yang et al. 2025).

The state S (K, V) of a head changes with each token: ``S = alpha S``, then ``S = S + k (beta (v - k^T S))``; the output
is ``q^T S`` with the new state. Shapes: B batch, T tokens, H value heads, G key heads, K and V the widths of a key and
a value, N chunks, C tokens of a chunk, M chunks behind which a state is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 64


def gated_delta_rule(
    state_BHKV: Tensor,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents: Tensor | None = None,
    *,
    ends: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, T, H, V) and the state after them; the inputs have the dtype of the state.

    Each of G query and key heads serves H / G value heads. `log_decay_BTH` is the logarithm of alpha. The first
    document of a row, by the numbers `documents` (B, T), continues the state; each other one begins with 0. Unless it
    `ends` with a state, the last one is not computed, and an earlier one is returned.
    """
    repeats = v_BTHV.shape[2] // k_BTGK.shape[2]
    q_BHTK, k_BHTK = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (q_BTGK, k_BTGK))
    v_BHTV, log_decay_BHT, beta_BHT = (x.transpose(1, 2) for x in (v_BTHV, log_decay_BTH, beta_BTH))
    if v_BHTV.shape[2] == 1:
        out_BHTV, state_BHKV = _step(state_BHKV, q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, beta_BHT)
    else:
        out_BHTV, state_BHKV = _chunked(state_BHKV, q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, beta_BHT, documents, ends)
    return out_BHTV.transpose(1, 2), state_BHKV


def _step(
    state: Tensor, q_BH1K: Tensor, k_BH1K: Tensor, v_BH1V: Tensor, log_decay_BH1: Tensor, beta_BH1: Tensor
) -> tuple[Tensor, Tensor]:
    state = state * log_decay_BH1.exp()[..., None]
    written_BH1V = beta_BH1[..., None] * (v_BH1V - k_BH1K @ state)
    state = state + k_BH1K.transpose(-2, -1) @ written_BH1V
    return q_BH1K @ state, state


def _chunked(
    state: Tensor,
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    log_decay_BHT: Tensor,
    beta_BHT: Tensor,
    documents: Tensor | None,
    ends: bool,
) -> tuple[Tensor, Tensor]:
    """Computes all tokens of a chunk together, and only the states at the ends of chunks one after another.

    What the tokens i of a chunk write, ``w_i = beta_i (v_i - gamma_i k_i^T S - sum_(j < i) gamma_i / gamma_j (k_i^T
    k_j) w_j)`` with the state S before the chunk and the product gamma of decays, solves a triangular system (Yang et
    al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", the WY representation).
    """
    length, size = v_BHTV.shape[2], min(_CHUNK, v_BHTV.shape[2])
    missing = -length % size

    def in_chunks(x_BHT: Tensor) -> Tensor:
        padding = (0, 0) * (x_BHT.ndim - 3) + (0, missing)  # a token of zeros changes no state
        padded = functional.pad(x_BHT, padding)
        return padded.view(*padded.shape[:2], -1, size, *padded.shape[3:])

    q, k, v, log_decay, beta = map(in_chunks, (q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, beta_BHT))
    beta_BHNC1, log_gamma_BHNC = beta[..., None], log_decay.cumsum(-1)
    seen = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    continues_BHNC: Tensor | None = None
    ends_with = None
    if documents is not None:
        of_chunk = functional.pad(documents, (0, missing), mode="replicate").view(len(documents), 1, -1, size)
        before = functional.pad(of_chunk[..., -1], (1, -1))
        before = torch.cat((of_chunk[:, :, :1, 0], before[:, :, 1:]), dim=2)
        seen = seen & (of_chunk[..., :, None] == of_chunk[..., None, :])
        continues_BHNC, ends_with = of_chunk == before[..., None], of_chunk == of_chunk[..., -1:]

    def kept(logarithm: Tensor, where: Tensor | None) -> Tensor:
        return (logarithm if where is None else logarithm.masked_fill(~where, -torch.inf)).exp()

    ratio_BHNCC = kept(log_gamma_BHNC[..., :, None] - log_gamma_BHNC[..., None, :], seen)
    since_BHNC1 = kept(log_gamma_BHNC, continues_BHNC)[..., None]
    num_states = v.shape[2] - (not ends)  # of those behind the chunks
    followed = log_gamma_BHNC[:, :, :num_states]
    until_BHMC = kept(followed[..., -1:] - followed, None if ends_with is None else ends_with[:, :, :num_states])
    k_BHMKC = (k[:, :, :num_states] * until_BHMC[..., None]).transpose(-2, -1)
    system_BHNCC = (beta_BHNC1 * (k @ k.transpose(-2, -1)) * ratio_BHNCC).tril(-1)
    sides = torch.cat((beta_BHNC1 * v, beta_BHNC1 * since_BHNC1 * k), dim=-1)
    # The diagonal counts as 1.
    solved = torch.linalg.solve_triangular(system_BHNCC, sides, upper=False, unitriangular=True)
    written_BHNCV, read_BHNCK = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within_BHNCC = q @ k.transpose(-2, -1) * ratio_BHNCC
    q_BHNCK = q * since_BHNC1
    found = []
    for n in range(v.shape[2]):
        written_BHCV = written_BHNCV[:, :, n] - read_BHNCK[:, :, n] @ state
        found.append(q_BHNCK[:, :, n] @ state + within_BHNCC[:, :, n] @ written_BHCV)
        if n < num_states:
            state = since_BHNC1[:, :, n, -1:] * state + k_BHMKC[:, :, n] @ written_BHCV
    return torch.cat(found, dim=2)[:, :, :length], state
