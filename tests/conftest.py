import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)      # the tests are small, so a second thread would only slow them down
signal.signal(signal.SIGINT, signal.default_int_handler)    # a background job ignores Ctrl-C

MATMUL = getattr(torch.backends.mkldnn, "matmul", None)
PRECISION = getattr(MATMUL, "fp32_precision", None)

@pytest.fixture(autouse=True)
def plain_matmul():
    """Undoes train.fast_matmul, which train.main and train.open_run call, for the next test."""
    if PRECISION is not None:
        MATMUL.fp32_precision = PRECISION
    yield

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: trains something; -m 'not slow' skips these tests")

@pytest.fixture(scope="session")
def small_world(tmp_path_factory):
    """A corpus file about 60 seen and 10 unseen subjects of the toy world."""
    import data
    lines, _ = data.toy_world(seed=3)
    seen = {line["title"] for line in lines if line["split"] == "train"}
    unseen = {line["title"] for line in lines} - seen
    keep = {*sorted(seen)[:60], *sorted(unseen)[:10]}
    path = tmp_path_factory.mktemp("world") / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["title"] in keep))
    return path

@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A run with all stages and two appends, with its state before and after each."""
    import faults
    return faults.Reference(tmp_path_factory.mktemp("faults") / "reference")

@pytest.fixture
def small(monkeypatch):
    """Makes this process use the tiny model, shards and toy world of tests/faults.py."""
    import faults
    faults.shrink(monkeypatch)

@pytest.fixture
def done(reference, small, tmp_path):
    """A copy of the complete run that a test may change."""
    return Path(shutil.copytree(reference.whole, tmp_path / "run"))
