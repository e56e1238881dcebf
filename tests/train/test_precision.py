"""Which precisions are worth timing on which device."""

from __future__ import annotations

import pytest
import torch

from sheepop.train.precision import candidates


@pytest.mark.parametrize(("native", "expected"), [(True, ["bf16"]), (False, ["fp32"])])
def test_emulated_bfloat16_is_not_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: list[str]
) -> None:
    """Where bfloat16 is only emulated, torch calls it supported unless asked to leave emulation out."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert candidates("auto", "cuda") == expected


def test_the_precision_asked_for_is_the_only_candidate() -> None:
    assert candidates("bf16", "cpu") == ["bf16"]
    assert candidates("fp32", "mps") == ["fp32"]
