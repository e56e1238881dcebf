"""The commands of docs/tuning.md run, in order, on a published model at toy size."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ..command_line import in_process
from ..hub_server import LoopbackHub, client, hub

__all__ = ["client", "hub"]

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
SMALL = [
    *("--device", "cpu", "training.max_steps=2", "training.global_batch_size=4", "training.sample_tokens=4"),
    "training.precision=fp32",  # chosen by measuring otherwise, for every command
]
SAID = "What is two plus five?"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``downloads/base``, as transformers saves a Llama with a chat template, and examples."""
    transformers = pytest.importorskip("transformers")
    from sheepop.core.console import Console
    from sheepop.tokenizer import TokenizerConfig, train_tokenizer

    place = tmp_path_factory.mktemp("published")
    base = place / "downloads" / "base"
    base.mkdir(parents=True)
    (place / "notes").mkdir()
    (place / "notes" / "a.txt").write_text((Path(json.__file__).parent / "decoder.py").read_text())
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=270), [f"{SAID} seven\n" * 60], console=Console.silent())
    tokenizer.save(base)
    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=2, eos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    row = {"messages": [{"role": "user", "content": SAID}, {"role": "assistant", "content": "seven"}]}
    other = {"instruction": "two plus", "input": "", "output": "five"}
    (place / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [row, other] * 20))
    return place


def commands() -> list[list[str]]:
    """The commands of the page, without that of conversations, which test_environment_tuning.py runs."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines() if "--environment" not in line]


def test_every_command_of_the_page_does_what_it_says(
    published: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import torch

    monkeypatch.chdir(published)
    monkeypatch.setenv("SHEEPOP_MODELS", str(published / "cache"))
    files = {file.name: file.read_bytes() for file in (published / "downloads" / "base").iterdir()}
    hub.repository("Qwen/Qwen3-0.6B", files)
    printed = {}
    for words in commands():
        trains = words[0] == "train" or (words[0] == "tune" and "--show" not in words)
        ended = in_process(*words, *(SMALL if trains else []), stdin=f"{SAID}\n" if words[0] == "chat" else None)
        assert ended.code == 0, f"{shlex.join(words)}: {ended.err}"
        printed[words[0], words[-1]] = ended.out
    shown = printed["tune", "3"]
    assert f"User:\n{SAID}<eos>\nAssistant:\n[[seven<eos>]]" in shown
    assert "A run takes" in shown and " of memory; " in shown
    assert len(re.findall(r"^chats\.jsonl, line \d: \d+ tokens, \d+ of them learnt$", shown, re.MULTILINE)) == 3

    # transformers opens the tuned model: the same conversation, the same greedy answer.
    tokenizer = transformers.AutoTokenizer.from_pretrained(published / "exports" / "chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "exports" / "chat")
    asked = [{"role": "user", "content": SAID}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    import sheepop

    lm = sheepop.load(published / "runs" / "chat")
    completion = lm.chat(asked, max_new_tokens=8, greedy=True)
    assert completion.token_ids == [int(token) for token in written][: len(completion.token_ids)]

    # PEFT opens the change beside the published model, which then computes what ours does.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(published / "downloads" / "base")
    adapted = peft.PeftModel.from_pretrained(theirs, published / "exports" / "adapter").eval()
    ours = sheepop.load(published / "runs" / "lora").model
    ids = given["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
        assert (adapted(ids).logits - model(ids).logits).abs().max() > 1e-3

        # The change comes back from PEFT's files, and added twice it counts twice.
        base, given = published / "models" / "base", [published / "exports" / "adapter", published / "runs" / "lora"]
        back = [sheepop.load(base, adapters=adapters) for adapters in ([], given[:1], given[1:], given)]
        for lm in back[1:3]:
            torch.testing.assert_close(lm.model(ids), ours(ids), rtol=1e-5, atol=1e-5)
        once, twice = (back[number].model.state_dict() for number in (1, 3))
        for name, weight in back[0].model.state_dict().items():
            torch.testing.assert_close(twice[name] - weight, 2 * (once[name] - weight), rtol=1e-4, atol=1e-6)
    assert back[2].chat(asked, max_new_tokens=2).text is not None  # by the template of the run
