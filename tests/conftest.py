"""Settings of the whole suite: one computing thread per test process, and no way out to the network."""

from __future__ import annotations

import os

from hypothesis import settings

# Toy models gain nothing from threads, and test processes that run side by side would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# A test that fails because the machine is busy says nothing about the code.
# Where CI is set, as it is on the machines that judge a change, every run draws the same examples.
settings.register_profile("sheepop", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("sheepop")
