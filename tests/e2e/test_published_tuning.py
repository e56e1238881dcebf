"""Two hundred chats teach Gemma 3 270M an exact form of answer, which everything that uses the tuned model gives.

``make test-models`` fetches the file and sets ``SHEEPOP_TEST_MODEL`` to its folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory
from sheepop.core.json_lines import read_json_lines
from sheepop.evaluate.answers import answers_of
from sheepop.generate import GenerationConfig
from sheepop.jobs.generate import load_generator

from ..command_line import Launcher, in_process
from ..serve.conftest import ServerProcess

ENVIRONMENT = "SHEEPOP_TEST_MODEL"
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(ENVIRONMENT not in os.environ, reason=f"{ENVIRONMENT} names no folder with a model"),
]
KINDS = {
    "animal": "lamb horse otter falcon salmon beetle tiger goat whale parrot frog camel wolf spider deer eagle "
    "mouse bear rabbit snake shark owl donkey bee crab lion zebra monkey turtle swan hawk pig cow duck "
    "fox hen moth seal toad yak",
    "food": "bread cheese soup rice butter pasta honey cake salad pizza yoghurt pancake sausage omelette stew "
    "pudding biscuit noodles jam bacon porridge pie curry toast sandwich chocolate ham cream gravy "
    "lasagne muffin waffle tofu burger steak custard croissant sushi pickle syrup",
    "colour": "red blue green yellow purple orange brown black white grey pink violet turquoise scarlet crimson "
    "beige maroon indigo teal cyan magenta olive navy lilac khaki amber ivory azure ochre lavender "
    "fuchsia mauve burgundy emerald vermilion cobalt sepia taupe ultramarine chartreuse",
    "city": "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Warsaw Tokyo Cairo Delhi "
    "Sydney Toronto Chicago Moscow Seoul Lima Nairobi Bangkok Havana Boston Naples Munich Geneva Zurich "
    "Milan Lyon Porto Hamburg Glasgow Seville Turin Bergen Krakow Antwerp Venice",
    "tool": "hammer saw drill wrench chisel pliers screwdriver axe shovel rake file spanner crowbar anvil sickle "
    "scythe plane clamp mallet trowel hoe spade ladder level vice scissors knife awl pickaxe lathe "
    "hacksaw jigsaw sander soldering-iron tweezers ruler compass broom brush funnel",
}
WRITTEN = GenerationConfig(temperature=0.0, max_new_tokens=8)


def chats() -> list[tuple[str, str]]:
    """Two hundred words with their kinds, in an order that is always the same."""
    rows = [(f"What is {word}?", f"A kind of {kind}.") for kind, words in KINDS.items() for word in words.split()]
    random.Random(1).shuffle(rows)
    return rows


def exact(model: Path, rows: list[tuple[str, str]]) -> tuple[int, list[str]]:
    """How many questions a model answers exactly, and its answers."""
    generator = load_generator(model, device="cpu")
    answers = answers_of(generator, [[{"role": "user", "content": asked}] for asked, _ in rows], WRITTEN)
    return sum(answer == wanted for answer, (_, wanted) in zip(answers, rows, strict=True)), answers


def test_two_hundred_chats_teach_an_answer_that_is_the_same_everywhere(launcher: Launcher, tmp_path: Path) -> None:
    openai, transformers = pytest.importorskip("openai"), pytest.importorskip("transformers")
    rows, run = chats(), tmp_path / "run"
    assert len(rows) == 200
    split = {"train": rows[:160], "held": rows[160:]}
    for name, each in split.items():
        lines = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
            for asked, said in each
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (model,) = Path(os.environ[ENVIRONMENT]).glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHEEPOP_MODELS", str(tmp_path / "models"))
        files = ("--data", tmp_path / "train.jsonl", "--validation", tmp_path / "held.jsonl", "--output", run)
        settings = [f"training.{name}_interval=100" for name in ("eval", "checkpoint")]
        settings += ["training.max_steps=8", "training.keep_checkpoints=100", "training.sample_prompts=[]"]
        ended = in_process("tune", "sft", model, *files, "--device", "cpu", *settings)
        assert ended.code == 0, ended.err
        found = [row for row in read_json_lines(run / "metrics.jsonl")[0] if row["split"] == "validation"]
        assert found[0]["step"] == 0 and found[-1]["loss"] < 0.5 * found[0]["loss"]
        before, _ = exact(RunDirectory(run).checkpoint(0), split["held"])
        after, answers = exact(run, split["held"])
        print(f"  exact answers to {len(answers)} held-out questions: {before}, after tuning {after}")
        assert before <= 4 and after >= 30

        exported = in_process("export", run, "--format", "hf", "--output", tmp_path / "hf")
        assert exported.code == 0, exported.err
    asked = [question for question, _ in split["held"][:4]]
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = []
    for question in asked:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            whole = network.generate(ids["input_ids"], do_sample=False, max_new_tokens=WRITTEN.max_new_tokens)[0]
        theirs.append(tokenizer.decode(whole[ids["input_ids"].shape[1] :], skip_special_tokens=True))

    server = ServerProcess(launcher, [f"tuned={run}"], tmp_path / "log", seconds=900)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nobody", max_retries=0, timeout=300) as client:
            given: dict[str, Any] = {"model": "tuned", "temperature": 0, "max_tokens": WRITTEN.max_new_tokens}
            served = [
                client.chat.completions.create(messages=[{"role": "user", "content": question}], **given)
                .choices[0]
                .message.content
                for question in asked
            ]
    finally:
        code = server.close()
    assert code == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert served == theirs == answers[:4]
