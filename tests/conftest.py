import json
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)      # the tests are small: a second thread costs more than it brings
signal.signal(signal.SIGINT, signal.default_int_handler)      # a job in the background starts with Ctrl-C ignored


MATMUL = getattr(torch.backends.mkldnn, "matmul", None)
PRECISION = getattr(MATMUL, "fp32_precision", None)


@pytest.fixture(autouse=True)
def plain_matmul():
    """train.main and train.open_run set oneDNN (train.fast_matmul): not for the next test."""
    if PRECISION is not None:
        MATMUL.fp32_precision = PRECISION
    yield


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: trains something; left out by -m 'not slow'")


@pytest.fixture(scope="session")
def small_world(tmp_path_factory):
    """A corpus file of 60 subjects of the toy world, with a few unseen ones: enough to train on for a few steps."""
    import data
    lines, _ = data.toy_world(seed=3)
    titles = {kind: sorted({line["title"] for line in lines if line["split"] == kind and line["title"] not in seen})
              for seen, kind in (((), "train"),)}
    unseen = sorted({line["title"] for line in lines} - set(titles["train"]))
    keep = set(titles["train"][:60] + unseen[:10])
    path = tmp_path_factory.mktemp("world") / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["title"] in keep))
    return path
