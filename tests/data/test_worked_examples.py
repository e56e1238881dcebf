"""The row "chunks" of the mathematics: length 5, stride 5, nine characters."""

from __future__ import annotations

import numpy as np

from sheepop.data import PaddedBatches, TokenSplit
from sheepop.tokenizer import CharTokenizer


def test_chunks_of_hi_world() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode("Hi, world")
    assert ids == [72, 105, 44, 32, 119, 111, 114, 108, 100]
    split = TokenSplit.from_documents([ids])
    batches = PaddedBatches(split, max_length=5, stride=5, pad_id=tokenizer.pad_id)
    batch = batches.batch(np.arange(batches.num_samples))
    assert batch.input_ids.tolist() == [[72, 105, 44, 32, 119], [111, 114, 108, 100, tokenizer.pad_id]]
    assert batch.labels.tolist() == [[105, 44, 32, 119, 111], [114, 108, 100, -100, -100]]
