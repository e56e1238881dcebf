"""Generation as a closed loop at a prompt: what a changed token does to what follows, and whether the text falls into a
loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import linear_regression
from typing import ClassVar

import torch

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.warping import warped
from sheepop.interpret.control.finding import Finding, columns
from sheepop.interpret.control.loops import (
    Entropy,
    Exponent,
    Loop,
    RepeatChances,
    SoftLoop,
    Survival,
    coincidence,
    divergence,
    entropy_and_slope,
    find_loop,
    lyapunov_exponent,
    repeat_chances,
    survival,
)
from sheepop.interpret.control.operating_point import OperatingPoint, plain_copy
from sheepop.interpret.pictures import Picture, panel, plain
from sheepop.model import Transformer
from sheepop.report.palette import TRAIN, VALIDATION

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
PENALTIES = (1.1, 1.3)
_WINDOW = 16  # tokens of the soft loop's state
_TOKENS_SHOWN = 12
_REPEATS = 4
_PHRASE = 4  # tokens of a phrase that did not repeat by itself
_LIKELY, _EVEN = 0.9, 0.5
_ABOVE_FLOOR = 10.0


@dataclass(frozen=True)
class ForcedDecay:
    """The KL in nats between the predictions of a text and of the same text with one other token at `position`.

    `divergences` begin with the prediction at that position, `floor` is what rounding alone makes of it, and `rate` the
    slope of the logarithm over the positions above the floor, per token; None if there are fewer than three.
    """

    position: int
    divergences: Sequence[float]
    floor: float
    rate: float | None

    @property
    def reach(self) -> int:
        """The number of predictions that the change moves by more than rounding does."""
        return sum(each > _ABOVE_FLOOR * self.floor for each in self.divergences)


@dataclass(frozen=True, eq=False)
class Decode(Finding):
    """The closed loop of generation at a prompt; the fields' classes say what each part is.

    `lyapunov` is None if there is no soft loop. `chances` are those of one more repeat of `phrase`: with the settings
    asked for, then with other temperatures and penalties.
    """

    verb: ClassVar[str] = "decode"
    derived: ClassVar[tuple[str, ...]] = ("is_looping", "repeats")
    left_out: ClassVar[tuple[str, ...]] = ("settings", "loop")
    token_ids: Sequence[int]
    text: str
    phrase: str
    settings: GenerationConfig
    forced: ForcedDecay
    survival: Survival
    lyapunov: Exponent | None
    loop: Loop | None
    chances: Sequence[RepeatChances]
    entropies: Sequence[Entropy]

    @property
    def is_looping(self) -> bool:
        """Whether the text repeats itself and each repeat is more likely than not."""
        return self.loop is not None and self.chances[0].last >= _EVEN

    @property
    def repeats(self) -> int | None:
        """How often the text repeats a phrase at its end; None if it does not."""
        return None if self.loop is None else self.loop.repeats

    def table(self) -> list[str]:
        """The KL and the survival by token, the chances of a repeat, and the entropies."""
        series = (self.forced.divergences, self.survival.equal, self.survival.divergence)
        by_token = list(zip_longest(range(max(map(len, series))), *series, fillvalue=""))[:_TOKENS_SHOWN]
        repeats = [(each.temperature, each.repetition_penalty, each.last, each.gain) for each in self.chances]
        entropies = [(each.temperature, each.entropy, each.slope) for each in self.entropies]
        return [
            *columns(("Token", "KL, same text:.3g", "still equal:.3g", "KL while equal:.3g"), by_token),
            "",
            *columns(("Temperature:g", "penalty:g", "next repeat:.3f", "gain:.3g"), repeats),
            "",
            *columns(("Temperature:g", "entropy:.3f", "slope:.3f"), entropies),
        ]

    def sentences(self) -> list[str]:
        """How far the change reaches, how soon sampled texts part, and whether the sampler loops."""
        lines = [self._decay_words(), self._survival_words()]
        if self.lyapunov is not None:
            found = self.lyapunov
            fate = "fade" if found.value < 0 else "grow"
            lines.append(
                f"Small changes of the soft loop {fate}: its Lyapunov exponent is {found.value:.3f} +- "
                f"{found.error:.3f} nats per token."
            )
        return [*lines, self._loop_words()]

    def _decay_words(self) -> str:
        decay, tokens = self.forced, counted(len(self.forced.divergences), "prediction")
        words = f"Another token at position {decay.position} moves {decay.reach} of {tokens} by more than rounding"
        if decay.rate is None:
            return f"{words}."
        if decay.rate >= 0:
            return f"{words}, and its effect does not fade."
        return f"{words}; its effect halves every {math.log(2) / -decay.rate:.1f} tokens."

    def _survival_words(self) -> str:
        found = self.survival
        half = next((step + 1 for step, equal in enumerate(found.equal) if equal < _EVEN), None)
        until = f"after {counted(half, 'token')}" if half else f"later than the {len(found.equal)} tokens measured"
        return (
            f"With the same random numbers, the texts after both prompts part {until} in half of all cases; "
            f"{counted(round(found.length), 'token')} are equal on average."
        )

    def _loop_words(self) -> str:
        own, phrase = self.chances[0], self.phrase
        if self.loop is None or not self.is_looping:
            if own.last >= _LIKELY and own.gain > 1:
                likely = f"once {phrase!r} is repeated, one more repeat has the probability {own.last:.2f}"
                return f"The text does not loop, but {likely}."
            return f"The sampler does not loop: one more repeat of {phrase!r} has the probability {own.last:.2g}."
        words = (
            f"The sampler loops: the text repeats {phrase!r} {self.loop.repeats} times, one more repeat has the "
            f"probability {own.last:.2f}, and each repeat multiplies its odds by {own.gain:.2g}."
        )
        cure = next((each for each in self.chances[1:] if each.last < _EVEN), None)
        if cure is None:
            return f"{words} No temperature or penalty that was tried breaks the loop; change the prompt."
        setting = f"temperature of {cure.temperature:g}"
        if cure.repetition_penalty != own.repetition_penalty:
            setting = f"repetition penalty of {cure.repetition_penalty:g}"
        return f"{words} With a {setting} the probability is {cure.last:.2g}."

    def pictures(self) -> Iterator[Picture]:
        """The decay of a change in a fixed text, and the survival of two sampled ones."""
        figure, axes = panel(7, 4, "What a changed token does to the next ones")
        values = [max(each, 1e-16) for each in self.forced.divergences]
        axes.plot(range(len(values)), values, color=TRAIN, marker="o", markersize=3, label="KL in the same text")
        if self.forced.floor:
            axes.axhline(self.forced.floor, color=TRAIN, linestyle="--", linewidth=1, label="rounding")
        axes.set(xlabel="Tokens after the change", ylabel="Nats", yscale="log")
        beside = axes.twinx()
        beside.plot(range(1, len(self.survival.equal) + 1), self.survival.equal, color=VALIDATION, label="still equal")
        beside.set(ylabel="Probability that sampled texts are still equal", ylim=(0, 1.02))
        lines = [*axes.get_lines(), *beside.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)
        plain(axes)
        yield Picture("decode", figure, {})


@torch.no_grad()
def decode(
    point: OperatingPoint, settings: GenerationConfig, *, length: int = 48, pairs: int = 8, seed: int = 0
) -> Decode:
    """Analyses generation after the prompt of an operating point with these settings.

    It writes at most `length` tokens, as far as the context has room, and compares texts in `pairs` trials. Raises
    `UsageError` for a prompt that leaves no room for at least two tokens.
    """
    model, tokenizer, prompt = point.model, point.trace.tokenizer, list(point.trace.token_ids)
    length = room_behind(model, prompt, length)
    written = _written(point, settings, length, seed)
    text, (changed, position) = [*prompt, *written], changed_prompt(model, prompt)
    generator = torch.Generator().manual_seed(seed)
    together = survival(
        lambda texts_BT: model(texts_BT, logits_to_keep=1)[:, -1],
        *(torch.tensor(ids, device=model.device) for ids in (prompt, changed)),
        steps=length,
        pairs=pairs,
        generator=generator,
        warp=lambda logits_BV: warped(logits_BV, [settings] * len(logits_BV)),
    )
    phrase, repeats = repeated_phrase(model, prompt, written)
    others = [settings.replace(temperature=each) for each in TEMPERATURES if each != settings.temperature]
    trials = [
        settings,
        *(each for each in others if each.temperature > settings.temperature),
        *(settings.replace(repetition_penalty=penalty) for penalty in PENALTIES),
        *(each for each in others if each.temperature < settings.temperature),
    ]
    logits_TV = model(torch.tensor([text], device=model.device))[0]
    entropies = []
    for temperature in sorted({*TEMPERATURES, settings.temperature} - {0.0}):
        entropy_T, slope_T = entropy_and_slope(logits_TV, temperature)
        entropies.append(Entropy(temperature, float(entropy_T.mean()), float(slope_T.mean())))
    # A copy in float64 takes twice the memory and is not kept.
    exact, _ = plain_copy(model, torch.float64)
    forced, exponent, notes = _forced(model, exact, text, [*changed, *written], position), None, point.notes
    try:
        soft = SoftLoop(exact, settings.temperature or 1.0)
    except UsageError as error:
        notes = *notes, str(error)
    else:
        state = soft.state(torch.tensor(text[-_WINDOW:], device=model.device))
        exponent = lyapunov_exponent(soft, state, generator, steps=length, settling=len(state))
    chances = repeat_chances(model, prompt, phrase, trials, repeats)
    said, repeated = tokenizer.decode(text), tokenizer.decode(phrase)
    loop = find_loop(written)
    return Decode(notes, text, said, repeated, settings, forced, together, exponent, loop, chances, entropies)


def _written(point: OperatingPoint, settings: GenerationConfig, length: int, seed: int) -> Sequence[int]:
    """The tokens that the model writes after the prompt."""
    config = settings.replace(max_new_tokens=length, seed=seed)
    (found,) = Generator(point.model, point.trace.tokenizer).generate([list(point.trace.token_ids)], config)
    return found.token_ids


def room_behind(model: Transformer, prompt: Sequence[int], length: int) -> int:
    """As much of `length` as fits behind the prompt; raises `UsageError` if that is less than two tokens."""
    length = min(length, model.config.max_seq_len - len(prompt))
    if length < 2:
        raise UsageError(
            f"The prompt has {counted(len(prompt), 'token')} and the model reads {model.config.max_seq_len}, so no "
            "text fits behind it. Shorten the prompt."
        )
    return length


@torch.no_grad()
def changed_prompt(model: Transformer, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The prompt with the token in its middle replaced by the likeliest other one, and the position of that."""
    position = len(prompt) // 2
    if position == 0:
        other = (prompt[0] + 1) % model.config.vocabulary
    else:
        logits_V = model(torch.tensor([prompt[:position]], device=model.device))[0, -1].clone()
        logits_V[prompt[position]] = -torch.inf
        other = int(logits_V.argmax())
    return [*prompt[:position], other, *prompt[position + 1 :]], position


def repeated_phrase(model: Transformer, prompt: Sequence[int], written: Sequence[int]) -> tuple[list[int], int]:
    """The phrase that the text repeats or ends with, and how many repeats fit behind the prompt, at most 4."""
    loop = find_loop(written)
    phrase = list(loop.phrase if loop else written[-_PHRASE:] or prompt[-1:])
    return phrase, max(1, min(_REPEATS, (model.config.max_seq_len - len(prompt)) // len(phrase) - 1))


def _forced(
    model: Transformer, exact: Transformer, text: Sequence[int], changed: Sequence[int], position: int
) -> ForcedDecay:
    rows = torch.tensor([text, changed], device=model.device)
    logits = model(rows)
    floor_T = divergence(exact(rows[:1])[0], logits[0])
    found = divergence(logits[0], logits[1])[position:].tolist()
    floor = float(floor_T.max()) if logits.dtype != torch.float64 else 0.0
    visible = [(step, math.log(each)) for step, each in enumerate(found) if each > max(_ABOVE_FLOOR * floor, 1e-30)]
    rate = linear_regression(*zip(*visible, strict=True)).slope if len(visible) >= 3 else None
    return ForcedDecay(position, found, floor, rate)


@dataclass(frozen=True)
class WrittenToken:
    """A written token, and the loop at the moment when it was drawn.

    `entropy` in nats is that of the prediction at the temperature of the settings (1 if greedy). `divergence` is the KL
    in nats from it to the prediction after the changed prompt and the same text, as in `Decode.forced`. `equal` is the
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
    written, equal = _written(point, settings, length, seed), 1.0
    for count, token_id in enumerate(written, 1):
        with torch.no_grad():
            logits_BV = model(texts, logits_to_keep=1)[:, -1]
            entropy, _ = entropy_and_slope(logits_BV[0], settings.temperature or 1.0)
            p, q = (each.double().softmax(-1) for each in warped(logits_BV, [settings] * 2))
        equal *= float(coincidence(p, q)[token_id] / p[token_id]) if p[token_id] > 0 else 0.0
        texts = torch.cat((texts, texts.new_full((2, 1), token_id)), 1)
        phrase, repeats = repeated_phrase(model, prompt, written[:count])
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
