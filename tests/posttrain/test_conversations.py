"""Conversations with an environment: a calculator, worked by hand, and what a program may do wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from sheepop.core.errors import ConfigError, TrainingError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.request import Completion
from sheepop.jobs.task.environment import Environment
from sheepop.model import IGNORE_INDEX, ModelConfig, build_model
from sheepop.parallel.ranks import ALONE
from sheepop.posttrain.config import GRPOConfig, PPOConfig
from sheepop.posttrain.conversations import Conversation, Conversing, Question, Reply, State, Transcript
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.policy import ADVANTAGES, OLD, REFERENCE, RETURNS, WEIGHTS, AnswerBatch, PolicyObjective
from sheepop.posttrain.reward_methods import GroupPolicy, ProximalPolicy
from sheepop.posttrain.rewards import Answer, Writer, Written
from sheepop.posttrain.rollouts import padded
from sheepop.serve.answer_text import answer_reader
from sheepop.tokenizer import ByteLevelBPE, ChatTemplate
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TOKENIZER = ByteLevelBPE.train(["user assistant tool\n some text and more of it\n\n"] * 9, 300, list(SPECIAL))
END = TOKENIZER.special_tokens["<|im_end|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "2+3?"}]

CALCULATOR = """
import random

class Environment:
    def reset(self, row, seed):
        self.row, self.draw = row, random.Random(seed)

    def step(self, message):
        for call in message.get("tool_calls", ()):
            total = sum(call["function"]["arguments"].values())
            return [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": str(total)}], 0.25, False
        return None, float(self.row["sum"] in message["content"]), True
"""
# Calls as Hermes writes them, and thoughts in the last turn alone, as Qwen3.
TEMPLATE = """
{%- set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>tool\nadd<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
SHOWN = "<|im_start|>tool\nadd<|im_end|>\n"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


class Scripted:
    """A policy that says what the test has written for it, whatever the prompt is."""

    tokenizer, ranks = TOKENIZER, ALONE

    def __init__(self, *turns: Sequence[str]) -> None:
        self.turns = list(turns)
        self.prompts: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], configs: list[GenerationConfig]) -> list[Completion]:
        self.prompts.append(prompts)
        found = []
        for prompt, text, config in zip(prompts, self.turns.pop(0), configs, strict=True):
            ids = TOKENIZER.encode(text, allow_special=True)[: config.max_new_tokens]
            reason = "stop" if ids[-1] == END else "length"
            logprobs = [-0.1 * (number + 1) for number in range(len(ids))]
            shown = TOKENIZER.decode(ids)
            found.append(
                Completion(shown, ids, reason, logprobs, TOKENIZER.decode(prompt), len(prompt), 0, 0)  # type: ignore[arg-type]
            )
        return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Environment]]:
    """``opened(source)``: the environment of a program with this text."""
    found: list[Environment] = []

    def make(source: str, seconds: float = 10.0, **options: Any) -> Environment:
        path = tmp_path / f"environment{len(found)}.py"
        path.write_text(source)
        found.append(Environment.open(str(path), seconds, **options))
        return found[-1]

    yield make
    for environment in found:
        environment.close()


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    with ChatTemplate(TEMPLATE) as made:
        yield made


def question(template: ChatTemplate, **row: Any) -> Question:
    """A prompt as a run stores it."""
    ids = ExampleEncoder(TOKENIZER, template, [END]).prompt(ASKED, TOOLS).ids
    return Question(ids, row or {"sum": "5"}, ASKED, TOOLS)


def converse(
    template: ChatTemplate,
    environment: Environment,
    *turns: Sequence[str],
    count: int = 1,
    max_turns: int = 4,
    max_new_tokens: int = 200,
) -> tuple[list[Conversation], Scripted]:
    policy = Scripted(*turns)
    conversing = Conversing(environment, template, answer_reader(TOKENIZER, template), max_turns)
    settings = GenerationConfig(max_new_tokens=max_new_tokens)
    return conversing(cast(Generator, policy), [question(template)], count, settings, seed=1), policy


def marked(conversation: Conversation) -> list[str]:
    """The texts of a conversation's sequences, with what the policy wrote between ``[[`` and ``]]``."""
    begins, ends = dict(conversation.spans), {end for _, end in conversation.spans}
    texts = [""]
    for place, token_id in enumerate(conversation.token_ids):
        texts[-1] += "]]" if place in ends else ""
        if place and place in conversation.starts:
            texts.append("")
        texts[-1] += "[[" if place in begins else ""
        texts[-1] += TOKENIZER.decode([token_id], skip_special=False)
    return [*texts[:-1], texts[-1] + ("]]" if len(conversation.token_ids) in ends else "")]


def test_only_what_the_policy_wrote_is_learnt(template: ChatTemplate, opened: Callable[..., Environment]) -> None:
    (found,), policy = converse(template, opened(CALCULATOR), [f"{CALL}<|im_end|>"], ["It is 5.<|im_end|>"])
    assert marked(found) == [
        f"{SHOWN}<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n[[{CALL}<|im_end|>]]\n"
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n[[It is 5.<|im_end|>]]"
    ]
    # What the policy read before its second answer is what inference has there: the conversation, rendered anew.
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    messages: list[dict[str, Any]] = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5"},
    ]
    assert policy.prompts[0] == [question(template).token_ids]
    assert policy.prompts[1] == [template.encode(TOKENIZER, messages, tools=TOOLS, add_generation_prompt=True)]
    assert found.messages == [*messages, {"role": "assistant", "content": "It is 5."}]
    assert (found.reward, found.is_finished) == (1.25, True)


def test_a_turn_that_is_rendered_differently_later_is_a_sequence_of_its_own(
    template: ChatTemplate, opened: Callable[..., Environment]
) -> None:
    asking = CALCULATOR.replace("return None, float", "return 'Sure?', float").replace("], True", "], False")
    asking = asking.replace('message["content"]), True', 'message["content"]), "Yes" in message["content"]')
    said = ["<think>2 and 3</think>It is 5.<|im_end|>"], ["Yes, 5.<|im_end|>"]
    (found,), policy = converse(template, opened(asking), *said)
    assert marked(found) == [
        f"{SHOWN}<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n[[<think>2 and 3</think>It is 5.<|im_end|>]]",
        f"{SHOWN}<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\nIt is 5.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[[Yes, 5.<|im_end|>]]",
    ]
    assert policy.prompts[1] == [found.sequence[: -len(TOKENIZER.encode("Yes, 5.<|im_end|>", allow_special=True))]]
    assert (found.reward, found.is_finished) == (2.0, True)


def test_turns_and_tokens_are_limited(template: ChatTemplate, opened: Callable[..., Environment]) -> None:
    environment, call = opened(CALCULATOR), f"{CALL}<|im_end|>"
    (turns,), _ = converse(template, environment, [call], [call], max_turns=2)
    assert (len(turns.spans), turns.reward, turns.is_finished) == (2, 0.5, False)
    size = len(TOKENIZER.encode(call, allow_special=True))
    (cut,), _ = converse(template, environment, [call], max_new_tokens=size - 2)
    assert (len(cut.token_ids), cut.reward, cut.is_finished) == (cut.most_tokens, 0.0, False)
    # The tool's answer leaves no room for another one of the model.
    (full,), _ = converse(template, environment, [call], max_new_tokens=size + 3)
    assert (len(full.spans), full.token_ids[-1], full.reward, full.is_finished) == (1, END, 0.25, False)


def slow_log_probabilities(model: Any, transcript: Transcript) -> list[float]:
    """Of each sampled token in turn, in float64, each sequence alone."""
    found = []
    ends = [*transcript.starts[1:], len(transcript.token_ids)]
    for start, end in zip(transcript.starts, ends, strict=True):
        ids = torch.tensor([transcript.token_ids[start:end]])
        log_p = model(ids)[0].detach().log_softmax(-1)
        for begin, stop in transcript.spans:
            if start <= begin < end:
                found += [float(log_p[t - 1 - start, transcript.token_ids[t]]) for t in range(begin, stop)]
    return found


def test_the_loss_is_that_of_a_loop_over_the_sampled_tokens(
    template: ChatTemplate, opened: Callable[..., Environment]
) -> None:
    """GRPO with a divergence in the loss: advantages, weights and terms of every token that the policy wrote."""
    asking = CALCULATOR.replace(
        "        return None",
        "        if '5' not in message['content']:\n            return 'Sure?', 0, False\n        return None",
    )
    said = (
        [f"{CALL}<|im_end|>", "<think>hm</think>6<|im_end|>"],
        ["It is 5.<|im_end|>", "Then it is 5.<|im_end|>"],
    )
    conversing = Conversing(opened(asking), template, answer_reader(TOKENIZER, template), 4)
    writer = Writer(TOKENIZER, {}, 200, 1.0, conversing=conversing)
    network = build_model(
        ModelConfig(vocab_size=TOKENIZER.vocab_size, d_model=16, num_layers=2, num_heads=2, max_seq_len=256, dropout=0),
        seed=3,
        device="cpu",
    ).eval()
    writer._generator = network, cast(Generator, Scripted(*said))
    written = writer(network, [question(template)], 2, seed=1)
    assert written.rewards == [1.25, 1.0] and written.lengths == [
        sum(len(TOKENIZER.encode(turn[number], allow_special=True)) for turn in said) for number in range(2)
    ]
    assert [len(transcript.starts) for transcript in written.transcripts] == [1, 2]
    method = GroupPolicy(GRPOConfig(group_size=2, baseline="centred"))
    learnt = written.learnt_from(method.advantages(written))
    batch = padded(learnt, pad_id=0)
    mask = torch.from_numpy(batch.labels != IGNORE_INDEX)
    numbers = method.numbers(learnt, mask, None, None, None)
    draw = np.random.default_rng(1)
    shifts = {name: draw.normal(0, 0.3, mask.shape).astype(np.float32) for name in (OLD, REFERENCE)}
    exact = build_model(network.config, seed=3, device="cpu").double().eval()
    truth = [slow_log_probabilities(exact, transcript) for transcript in written.transcripts]
    objective = PolicyObjective(clip_low=0.1, clip_high=0.2, kl_coef=0.3, unit="answer")
    expected = 0.0
    for row, log_ps in enumerate(truth):
        places = mask[row].nonzero()[:, 0].tolist()
        assert len(places) == len(log_ps)
        for place, log_p in zip(places, log_ps, strict=True):
            for name in (OLD, REFERENCE):
                shifts[name][row, place] += log_p
            ratio = np.exp(log_p - shifts[OLD][row, place].astype(float))
            advantage = (0.125, -0.125)[row]
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.9), 1.2))
            apart = log_p - shifts[REFERENCE][row, place].astype(float)
            expected += (loss + 0.3 * (np.exp(-apart) - 1 + apart)) / len(log_ps)
    arrays = {name: tensor.float().numpy() for name, tensor in numbers.items()}
    given = AnswerBatch.of(batch.input_ids, batch.labels, batch.lengths, {**arrays, **shifts}, batch.document_ids)
    sums = objective.loss_sums(FinishedNetwork(network), TensorBatch.from_numpy(given, "cpu"))
    assert sums.objective.item() == pytest.approx(expected, rel=1e-4)
    assert objective.supervised(given) == 2
    assert (numbers[ADVANTAGES][~mask] == 0).all() and (numbers[WEIGHTS][~mask] == 0).all()


def test_the_advantages_of_ppo_run_over_turns_and_skip_what_the_environment_wrote(
    template: ChatTemplate, opened: Callable[..., Environment]
) -> None:
    (found,), _ = converse(template, opened(CALCULATOR), [f"{CALL}<|im_end|>"], ["It is 5.<|im_end|>"])
    transcript = Transcript(found.token_ids, found.spans, found.starts, found.rewards)
    answer, reward = Answer("2+3?", found.text, found.sequence), found.reward or 0.0
    written = Written([answer], [transcript], [True], [reward], [{"environment": reward}], [found.logprobs])
    batch = padded(written, pad_id=0)
    mask = torch.from_numpy(batch.labels != IGNORE_INDEX)
    values = torch.from_numpy(np.random.default_rng(2).normal(size=mask.shape).astype(np.float32))
    config = PPOConfig(normalise_rewards=False, kl_coef=0.0, whiten=False, gamma=0.9, gae_lambda=0.8)
    numbers = ProximalPolicy(config).numbers(written, mask, torch.zeros(mask.shape), None, values)
    places = mask[0].nonzero()[:, 0].tolist()
    expected, later, following = {}, 0.0, 0.0
    (begin, end), _ = found.spans
    credit = {places[end - begin - 1]: 0.25, places[-1]: 1.0}
    for place in reversed(places):
        value = float(values[0, place])
        error = credit.get(place, 0.0) + 0.9 * following - value
        later, following = error + 0.9 * 0.8 * later, value
        expected[place] = later
    for place in places:
        assert float(numbers[ADVANTAGES][0, place]) == pytest.approx(expected[place], rel=1e-4, abs=1e-5)
    assert (numbers[ADVANTAGES][~mask] == 0).all()
    judged = written.learnt_from([0.0])
    judged.rewards[0] += 10.0  # of other sources, for the whole conversation
    returns = config.replace(gamma=1.0, gae_lambda=1.0)
    found_returns = ProximalPolicy(returns).numbers(judged, mask, torch.zeros(mask.shape), None, values)[RETURNS]
    assert found_returns[0, places].tolist() == pytest.approx(
        [11.25] * (end - begin) + [11.0] * (len(places) - end + begin)
    )


COUNTING = """
import time

class Environment:
    def reset(self, row):
        self.said = []
        return [{"role": "user", "content": "begin"}] if row.get("asks") else None

    def step(self, message):
        self.said.append(message["content"])
        if message["content"] == "raise":
            raise ValueError("no such thing")
        while message["content"] == "hang":
            time.sleep(0.1)
        return ODD.get(message["content"]) or (" ".join(self.said), len(self.said), False)

ODD = {
    "pair": (None, 1.0), "silent": (None, 1.0, False), "endless": ("a", float("inf"), False),
    "assistant": ([{"role": "assistant", "content": "me"}], 0.0, False),
}
"""


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} for text in texts]


def test_a_conversation_that_hangs_is_left_out_and_the_others_go_on(opened: Callable[..., Environment]) -> None:
    environment = opened(COUNTING, 1.5, may_fail=True)
    first = environment([State(number, {"asks": number}, 0, said()) for number in range(3)])
    assert first == [Reply(()), *[Reply(({"role": "user", "content": "begin"},))] * 2]
    states = [State(number, {}, 0, said("one", text)) for number, text in enumerate(("two", "hang", "raise"))]
    replies = environment(states)
    assert replies == [Reply(({"role": "user", "content": "one two"},), 2.0), None, None]
    # The process that hung is gone, with the objects in it; another one has heard the same.
    assert environment([State(0, {}, 0, said("one", "two", "three"))])[0] == Reply(
        ({"role": "user", "content": "one two three"},), 3.0
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise", r"failed: ValueError: no such thing; in step 2 of the row \{'n': 1\}"),
        ("hang", r"took more than 1\.5 s, its time limit \(reward_seconds\)"),
        ("pair", "failed: TypeError: step must return messages, a reward and whether the conversation is done"),
        ("silent", "there is no message to go on with, and the conversation is not done"),
        ("endless", "the reward is inf, not a finite number"),
        ("assistant", r"messages\[0\]\.role: is 'assistant', not one of system, user, tool"),
    ],
)
def test_an_environment_that_fails_stops_the_run_and_says_where(
    opened: Callable[..., Environment], text: str, problem: str
) -> None:
    with pytest.raises(TrainingError, match=problem):
        opened(COUNTING, 1.5 if text == "hang" else 60)([State(0, {"n": 1}, 0, said("one", text))])


@pytest.mark.parametrize(
    ("source", "problem"),
    [("x = 1", "defines no class Environment with reset"), ("class Environment: pass", "defines no class"), ("(", "")],
)
def test_a_file_without_an_environment_is_refused(
    opened: Callable[..., Environment], source: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"environment0\.py cannot be loaded: .*{problem}"):
        opened(source)
