"""Generation as a closed loop while it runs: what each written token says of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.warping import warped
from sheepop.interpret.control.coupling import coincidence, divergence
from sheepop.interpret.control.decode import changed_prompt, repeated_phrase, room_behind
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.control.repetition import entropy_and_slope, repeat_chances


@dataclass(frozen=True)
class WrittenToken:
    """A written token, and the loop at the moment when it was drawn.

    `entropy` in nats is that of the prediction at the temperature of the settings (1 if greedy). `divergence` is the KL
    in nats from it to the prediction after the changed prompt and the same text, as in `Decode.decay`. `equal` is the
    probability that a text that is drawn after the changed prompt with the same random numbers is the same up to here;
    its mean over texts is `Survival.equal`. `again` is the probability that `phrase`, which the text repeats or ends
    with, follows once more, and `gain` the factor by which each repeat multiplies its odds; see `RepeatChances`.
    """

    token_id: int
    text: str
    entropy: float
    divergence: float
    equal: float
    phrase: str
    again: float
    gain: float


def written_tokens(
    point: OperatingPoint, settings: GenerationConfig, *, length: int = 48, seed: int = 0
) -> Iterator[WrittenToken]:
    """Writes the text that `decode` analyses, and yields its tokens as they are measured.

    One token of the prompt is changed as in `decode`; penalties are left out of `entropy` and `equal`. Raises
    `UsageError` for a prompt that leaves no room for at least two tokens.
    """
    model, tokenizer, prompt = point.model, point.trace.tokenizer, point.trace.token_ids
    length = room_behind(model, prompt, length)
    texts = torch.tensor([prompt, changed_prompt(model, prompt)[0]], device=model.device)
    config = settings.replace(max_new_tokens=length, seed=seed)
    (whole,) = Generator(model, tokenizer).generate([list(prompt)], config)
    equal = 1.0
    for count, token_id in enumerate(whole.token_ids, 1):
        with torch.no_grad():
            logits_BV = model(texts, logits_to_keep=1)[:, -1]
            entropy, _ = entropy_and_slope(logits_BV[0], settings.temperature or 1.0)
            p, q = (each.double().softmax(-1) for each in warped(logits_BV, [settings] * 2))
        equal *= float(coincidence(p, q)[token_id] / p[token_id]) if p[token_id] > 0 else 0.0
        texts = torch.cat((texts, texts.new_full((2, 1), token_id)), 1)
        phrase, repeats = repeated_phrase(model, prompt, whole.token_ids[:count])
        (chances,) = repeat_chances(model, prompt, phrase, [settings], repeats)
        yield WrittenToken(
            token_id,
            tokenizer.decode([token_id]),
            float(entropy),
            float(divergence(*logits_BV)),
            equal,
            tokenizer.decode(phrase),
            chances.last,
            chances.gain,
        )
