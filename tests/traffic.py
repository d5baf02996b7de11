"""Counts the bytes that a process sends with torch.distributed (test_ann.py, test_sharded.py)."""
import sys
from collections import Counter
from contextlib import contextmanager

import torch.distributed as dist

@contextmanager
def counted():
    """Counts the bytes that this process sends inside the `with` block, by purpose: "gather",
    "candidates", "ids", "rows" and "gradients" (an all-reduce counts once). Row counts, losses and
    backward passes are not counted."""
    sent, rank = Counter(), dist.get_rank() if dist.is_initialized() else 0
    before = dist.all_gather, dist.all_to_all_single, dist.all_reduce

    def all_gather(parts, x):
        frame = sys._getframe(1)                                        # the caller of AllGather
        while not frame.f_code.co_name.startswith("gather"):
            frame = frame.f_back
        if frame.f_code.co_name != "gather_counts":
            sent["gather"] += x.nbytes * (len(parts) - 1)
        return before[0](parts, x)

    def all_to_all_single(received, x, receive=None, send=None):
        if send is not None:                                                # not AllGather.backward
            frame, what = sys._getframe(2), "candidates"                    # exchange's caller
            if frame.f_code.co_name == "fetch":
                what = "rows" if "table" in frame.f_locals else "ids"
            sent[what] += x[:1].nbytes * (sum(send) - send[rank])
        return before[1](received, x, receive, send)

    def all_reduce(x):
        if sys._getframe(1).f_code.co_name == "sum_gradients":
            sent["gradients"] += x.nbytes
        return before[2](x)

    dist.all_gather, dist.all_to_all_single = all_gather, all_to_all_single
    dist.all_reduce = all_reduce
    try:
        yield sent
    finally:
        dist.all_gather, dist.all_to_all_single, dist.all_reduce = before
