"""The closed loop of generation as a whole: what is found at a prompt, and how it is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.analyses import Analyses
from sheepop.interpret.control.decode import Decode
from sheepop.interpret.control.loops import divergence
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

Build = Callable[..., Transformer]
PLAIN = GenerationConfig(top_k=None, top_p=1.0)


def decoded(model: Transformer, prompt: str, settings: GenerationConfig = PLAIN, length: int = 8) -> Decode:
    return Analyses(model, CharTokenizer(), "float64").decode(prompt, settings, length=length, pairs=2)


@torch.no_grad()
def bigrams(network: Build, chosen: int | None = None) -> Transformer:
    """A network without attention: each prediction depends on the last token alone; `chosen` always follows."""
    model = network(num_layers=1, position_encoding="rope", tie_weights=False)
    attention = model.layers[0].attention
    assert attention is not None
    attention.o_proj.weight.zero_()
    if chosen is not None:
        model.final_norm.weight.zero_()  # type: ignore[union-attr, operator]
        model.final_norm.bias.fill_(1.0)  # type: ignore[union-attr, operator]
        model.lm_head.weight.zero_()
        model.lm_head.weight[chosen] = 0.2
    return model


def test_a_changed_token_of_bigrams_moves_one_prediction_only(network: Build) -> None:
    """The divergence is exactly 0 after one step, and no rate can be told from a single number."""
    found = decoded(bigrams(network), "abcdef").forced
    assert found.position == 3 and found.divergences[0] > 0.001
    assert set(found.divergences[1:]) == {0.0}
    assert found.rate is None and found.reach == 1


def test_the_forced_divergences_are_those_of_two_passes(network: Build) -> None:
    model = network().eval()
    found = decoded(model, "abcdef")
    with torch.no_grad():
        text = list(found.token_ids)
        others = [[*text[:3], token, *text[4:]] for token in range(128) if token != text[3]]
        before = model(torch.tensor([text[:3]]))[0, -1].tolist()
        likeliest = max((each for each in others), key=lambda ids: before[ids[3]])
        logits = model(torch.tensor([text, likeliest]))
    assert found.forced.divergences == pytest.approx(divergence(logits[0], logits[1])[3:].tolist())


def test_a_looping_sampler_is_found_and_named(network: Build) -> None:
    """Token x has a logit of 6.4 and all others 0, so that it follows with probability e^6.4 / (e^6.4 + 127)."""
    found = decoded(bigrams(network, ord("x")), "ab", PLAIN.replace(temperature=0.5), length=20)
    assert found.is_looping and found.phrase == "x"
    assert found.chances[0].last == pytest.approx(1 / (1 + 127 * 2.718281828459045 ** (-6.4 / 0.5)), rel=1e-6)
    assert "The sampler loops: the text repeats 'x' 20 times" in found.sentences()[-1]
    assert "With a temperature of 1.5 the probability is" in found.sentences()[-1]


def test_a_sampler_that_does_not_loop_is_said_to(network: Build) -> None:
    found = decoded(network(), "abcdef", PLAIN.replace(temperature=1.5))
    assert not found.is_looping
    assert found.sentences()[-1].startswith("The sampler does not loop")
    assert found.to_dict()["is_looping"] is False


def test_greedy_texts_with_equal_predictions_never_part(network: Build) -> None:
    found = decoded(bigrams(network, ord("x")), "ab", PLAIN.replace(temperature=0.0))
    assert found.survival.equal == [1.0] * 8


def test_one_token_is_enough_and_a_full_context_is_refused(network: Build) -> None:
    found = decoded(network(), "a")
    assert found.forced.position == 0 and len(found.forced.divergences) == 9
    with pytest.raises(UsageError, match="no text fits behind it"):
        decoded(network(), "a" * 31)
