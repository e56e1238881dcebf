"""The loop of a text while it is written: the numbers of each token are those of separate passes, and of `decode`."""

from __future__ import annotations

import pytest
import torch

from sheepop.generate import GenerationConfig
from sheepop.interpret.control.analyses import Analyses
from sheepop.tokenizer import CharTokenizer

from ...serve.conftest import tiny_network

PROMPT = "The sheep"


def test_each_token_has_the_numbers_of_its_own_passes_and_the_last_those_of_decode() -> None:
    model, tokenizer, settings = (
        tiny_network(),
        CharTokenizer(),
        GenerationConfig(temperature=0.7, top_k=None, top_p=1.0),
    )
    rows = list(Analyses(model, tokenizer).writing(PROMPT, settings, length=8))
    whole = Analyses(model, tokenizer).decode(PROMPT, settings, length=8)
    prompt = tokenizer.encode(PROMPT)
    assert [*prompt, *(row.token_id for row in rows)] == list(whole.token_ids)
    behind = len(prompt) - 1 - whole.forced.position
    assert [row.divergence for row in rows] == pytest.approx(list(whole.forced.divergences[behind:-1]), rel=1e-4)
    assert (rows[-1].again, rows[-1].gain) == (whole.chances[0].last, whole.chances[0].gain)
    changed = [*prompt[:4], _runner_up(model, prompt), *prompt[5:]]
    equal = 1.0
    for place, row in enumerate(rows):
        texts = torch.tensor([[*each, *(other.token_id for other in rows[:place])] for each in (prompt, changed)])
        p, q = (model(texts)[:, -1].detach().double() / 0.7).softmax(-1)
        assert row.entropy == pytest.approx(float(-(p * p.log()).sum()), rel=1e-4)
        # Both draw token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i).
        i = row.token_id
        equal *= float(1 / torch.maximum(p / p[i], q / q[i]).sum() / p[i])
        assert row.equal == pytest.approx(equal, rel=1e-3)


def _runner_up(model: torch.nn.Module, prompt: list[int]) -> int:
    order = model(torch.tensor([prompt[:4]]))[0, -1].argsort(descending=True).tolist()
    return next(token for token in order if token != prompt[4])


@pytest.mark.parametrize("analysis", ["gains", "influence", "blocks", "decode", "impulse", "state_space"])
def test_every_analysis_can_be_ended(analysis: str) -> None:
    class LeftError(Exception):
        pass

    calls = 0

    def proceed() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise LeftError

    with pytest.raises(LeftError):
        getattr(Analyses(tiny_network(), CharTokenizer(), proceed=proceed), analysis)(PROMPT)
    assert calls == 4
