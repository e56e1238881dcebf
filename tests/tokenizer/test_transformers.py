"""transformers reads the directory that SheepOp writes and gives the same ids."""

from pathlib import Path

import pytest

from sheepop.tokenizer import CharTokenizer, Tokenizer

TEXTS = [
    "Hello World",
    "def f(self, x):\n        return x + 12345\n\n\nclass A:\n\tpass\r\n",
    "  two  spaces , and don't . é🐑 e\u0301 \u00a0",
    "<bos>text<eos>",
    "",
]


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece", "unigram", "char"])
def test_auto_tokenizer_gives_the_same_ids_and_text(
    algorithm: str, trained: dict[str, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    ours = CharTokenizer.train(TEXTS) if algorithm == "char" else trained[algorithm]
    ours.save(tmp_path, model_max_length=128)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 128
    roles = (theirs.pad_token_id, theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id)
    assert roles == (0, 1, 2, 3)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text, allow_special=True)
        assert theirs.decode(ids) == ours.decode(ids, skip_special=False)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
