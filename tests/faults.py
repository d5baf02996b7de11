"""What machines do to a run, done on purpose: kills, power cuts, damaged files, bad lines, full disks.

    python tests/faults.py                 the whole campaign, with its figures (hours on one core)
    python tests/faults.py kill corrupt    parts of it: kill, term, power, settings, corrupt, fuzz, leak
    python tests/faults.py kill power 10   only one in ten of the file operations

tests/test_faults.py runs a few faults of each kind. A fault is injected into a forked child that
runs a user's command on a very small model. Whatever happens to it, the same command is given
again, and the folder is compared, file by file, with that of a run to which nothing happened.
"""
import gc
import io
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
import eval as evaluation
import memory
import train

MORE = ("first", "second", "third")         # corpus files to append
MICRO = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 1, "n_upper": 1, "cluster": 8, "log_every": 3,
         "save_every": 2, "eval_mentions": 8, "key_dim": 16, "value_dim": 16, "coref_dim": 16, "vocab": 600, "k": 8,
         "k_shard": 8, "k_answer": 8, "k_answer_shard": 8, "max_positions": 96, "max_length": 96, "dropout": 0.1,
         "schedule": {name: train.Schedule(6, 1e-3, 1, 8) for name in ("batch-tome", "tome", "claims", "qa")}}
SHARD = 16                      # passages a shard
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])     # imports half of PyTorch: once, before we fork

toy_world = cache(lambda: data.toy_world(seed=3))

def shrink():
    train.PRESETS["toy"] = MICRO
    memory.PASSAGES_PER_SHARD = SHARD

def write_world(folder, subjects=24):
    """corpus.jsonl, qa.train.jsonl and corpora to append, of a few subjects of the toy world."""
    lines, examples = toy_world()
    seen = {line["title"] for line in lines if line["split"] == "train"}
    keep = {*sorted(seen)[:subjects], *sorted({line["title"] for line in lines} - seen)[:4]}
    rows = [e for e in examples["qa.one_hop.train"] if e["subject"] in keep][:24]
    for name, records in (("corpus", [line for line in lines if line["title"] in keep]), ("qa.train", rows)):
        data.write_lines(folder / f"{name}.jsonl", records)
    others = sorted(seen - keep)
    for i, name in enumerate(MORE):
        titles = others[5 * i:5 * i + 5]
        data.write_lines(folder / f"{name}.jsonl", [line for line in lines if line["title"] in titles])

def command(stage, world, out, *more):
    """The arguments of train.py for a stage. "corpus": the preparation that batch-tome begins with;
    "append first": adding that corpus to the memory."""
    name, _, file = stage.partition(" ")
    arguments = ["--corpus", world / "corpus.jsonl", "--out", out, "--quiet"]
    if file:
        arguments += ["--stage", "memory", "--append", world / f"{file}.jsonl"]
    elif name == "finetune":
        arguments += ["--stage", name, "--task", "qa", "--examples", world / "qa.train.jsonl"]
    else:
        arguments += ["--stage", "batch-tome" if name == "corpus" else name]
    return [str(a) for a in [*arguments, *more]]

# ---- children

class Child:
    """train.main(arguments) in a forked process, after fault() there. What it prints goes to a file."""

    def __init__(self, arguments, fault=lambda: None, environment={}, main=train.main):
        self.said = tempfile.TemporaryFile("w+")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.dup2(self.said.fileno(), 1)
                os.dup2(self.said.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update(environment)
                sys.dont_write_bytecode = True
                shrink()
                fault()
                code = main(arguments)
            except SystemExit as leaving:
                code = leaving.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def wait(self, limit=120):
        """(exit code or minus the signal, what was said)."""
        deadline = time.time() + limit
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.time() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"hangs: not done after {limit} s")
            time.sleep(0.002)
        self.said.seek(0)
        return os.waitstatus_to_exitcode(status), self.said.read()

def run(arguments, fault=lambda: None, **more):
    return Child(arguments, fault, **more).wait()

# ---- file operations

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")

def path_of(name, folder_fd=-1):
    """The whole path of an audit event's name, which may be relative to an open folder."""
    name = os.fsdecode(name)
    if folder_fd is not None and folder_fd >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), name)
    return os.path.abspath(name)

def watch_operations(before):
    """Calls before(what, *paths) ahead of every change to files from now on: a file opened for
    writing ("open"), CHANGES, and "fsync"."""
    real = os.fsync

    def hook(event, args):
        if event == "open" and isinstance(args[2], int) and isinstance(args[0], (str, bytes)):
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                before("open", path_of(args[0]))
        elif event in ("os.rename", "os.link"):
            before(event, path_of(args[0], args[2]), path_of(args[1], args[3]))
        elif event in CHANGES:
            before(event, path_of(args[0], args[-1] if event != "os.truncate" else -1))

    def fsync(fd):
        before("fsync", os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)
    os.fsync = fsync
    sys.addaudithook(hook)

def count_operations(file):
    """Not a fault: notes each operation in a file."""
    def fault():
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        watch_operations(lambda what, *paths: os.write(fd, f"{what} {paths[0]}\n".encode()))
    return fault

def die_at(n):
    """A fault: SIGKILL before the n-th file operation. Of what is being written then, a temporary
    file or a line of the log, only a part has reached the disk."""
    def fault():
        count = itertools.count(1)

        def before(what, *paths):
            if next(count) == n:
                if what == "fsync" and paths[0].endswith((".tmp", ".jsonl")):
                    size = os.path.getsize(paths[0])
                    os.truncate(paths[0], size // 2 if paths[0].endswith(".tmp") else size - 9)
                os.kill(os.getpid(), signal.SIGKILL)
        watch_operations(before)
    return fault

def stop_at(n):
    """A fault: SIGTERM before the n-th file operation."""
    def fault():
        count = itertools.count(1)
        watch_operations(lambda what, *paths: next(count) == n and os.kill(os.getpid(), signal.SIGTERM))
    return fault

def power_cut_at(n):
    """A fault: at the n-th file operation everything is lost that was not made durable: what was
    written to a file since its last fsync, and names that were given, changed or removed since the
    last fsync of their folder."""
    def fault():
        count, written, names, over = itertools.count(1), {}, [], []

        def held(path):
            return Path(path).read_bytes() if os.path.isfile(path) else None

        def before(what, *paths):
            if over:
                return
            if next(count) == n:
                over.append(True)
                lose()
                os.kill(os.getpid(), signal.SIGKILL)
            first, last = paths[0], paths[-1]
            if what == "open":
                if not os.path.exists(first):
                    names.append(("made", first, None, None))
                    written[first] = None
                elif os.path.isfile(first):
                    written.setdefault(first, held(first))
            elif what == "fsync":
                written.pop(first, None)
                names[:] = [change for change in names if os.path.dirname(change[1]) != first]
            elif what in ("os.mkdir", "os.link"):
                if not os.path.exists(last):
                    names.append(("made", last, None, None))
            elif what == "os.remove":
                if os.path.isfile(first):
                    names.append(("removed", first, None, held(first)))
            elif what == "os.rename":
                names.append(("renamed", last, first, held(last)))
                for path in [p for p in written if p == first or p.startswith(first + os.sep)]:
                    written[last + path[len(first):]] = written.pop(path)

        def lose():
            for path, content in written.items():
                if os.path.exists(path):
                    Path(path).write_bytes(content or b"")
            for how, path, source, content in reversed(names):
                if how == "made" and os.path.isdir(path):
                    shutil.rmtree(path)
                elif how == "made" and os.path.exists(path):
                    os.unlink(path)
                elif how == "renamed" and os.path.exists(path):
                    os.rename(path, source)
                if content is not None and os.path.isdir(os.path.dirname(path)):
                    Path(path).write_bytes(content)
        watch_operations(before)
    return fault

# ---- comparing

def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b

def contents(out):
    """{file: what it holds}: bytes; of a checkpoint its values; of the log {(stage, step): record
    without the timing}: what was done again after a crash counts, a torn line does not."""
    held = {}
    for path in sorted(p for p in Path(out).rglob("*") if p.is_file()):
        name = str(path.relative_to(out))
        if name.endswith(".pt"):
            held[name] = torch.load(path, weights_only=True)
        elif name == "log.jsonl":
            held[name] = {}
            for line in path.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    held[name][record["stage"], record["step"]] = record
                    del record["seconds"]
        else:
            held[name] = path.read_bytes()
    return held

def difference(out, expected):
    """The names of files that differ from, are missing in or too many for `expected`."""
    found = contents(out)
    return sorted({n for n in found.keys() ^ expected.keys()} | {n for n in found.keys() & expected.keys()
                                                                 if not equal(found[n], expected[n])})

STAGES = ("corpus", "batch-tome", "memory", "tome", "finetune", "append first", "append second",
          "append third")

class Reference:
    """A run to which nothing happened: before[stage], a folder as the stage finds it; after[stage],
    its contents; operations[stage], what the stage did to files. `run`: after finetune."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        folder.mkdir(exist_ok=True)
        write_world(folder)
        self.before, self.after, self.operations = {}, {}, {}
        out, counted = folder / "working", folder / "counted"
        out.mkdir()
        for stage in STAGES:
            if stage == "batch-tome":           # with the corpus, without anything trained
                for path in (*out.glob("*.pt"), out / "log.jsonl"):
                    path.unlink()
            self.before[stage] = folder / f"before {stage}"
            shutil.copytree(out, self.before[stage])
            code, said = run(command(stage, folder, out), count_operations(counted))
            assert code == 0, said
            self.operations[stage] = counted.read_text().splitlines()
            counted.unlink()
            self.after[stage] = contents(out)
            if stage == "finetune":
                shutil.copytree(out, self.run)

    @cached_property
    def spoilt_in(self):
        """The folders in which KINDS are spoilt: a whole run, and stages cut off in the middle."""
        folders = {"memory": self.before["memory"], "done": self.run}
        half = len(self.operations["memory"]) // 2
        for name, stage, fault in (("half a memory", "memory", die_at(half)),
                                   ("half a tome", "tome", die_at_step(6))):
            out = self.fresh(self.before[stage])
            run(command(stage, self.folder, out), fault)
            folders[name] = Path(shutil.copytree(out, self.folder / name))
        return folders

    @cache
    def says(self, where, how):
        """What a command says in a folder where nothing is spoilt."""
        code, result, err = command_of(how, self.folder, self.fresh(self.spoilt_in[where]))
        assert code == 0, err
        return result

    def fresh(self, folder):
        """A copy, to be spoilt, of a folder or of what a stage finds, always under one name."""
        out = self.folder / "spoilt"
        shutil.rmtree(out, ignore_errors=True)
        return Path(shutil.copytree(self.before.get(folder, folder), out))

def after_fault(reference, stage, fault):
    """The stage with a fault, then the same command again: (did it end early, what went wrong or None). With SIGTERM
    it ends with 130, or with 0 where its work was done."""
    out = reference.fresh(stage)
    arguments = command(stage, reference.folder, out)
    code, said = run(arguments, fault)
    if code not in (0, 130, -signal.SIGKILL):
        return False, f"ended with {code}: {said[-500:]}"
    died = code != 0
    code, said = run(arguments)
    if code:
        return died, said[-500:]
    differs = difference(out, reference.after[stage])
    return died, f"{differs} differ" if differs else None

def kills(reference, stage, fault, points):
    """A fault at each of these operations (1, 2, …). Returns how many died, and what went wrong."""
    died, wrong = 0, []
    for n in points:
        dead, problem = after_fault(reference, stage, fault(n))
        died += dead
        if problem:
            wrong.append(f"{stage}, {fault.__name__}({n}), {reference.operations[stage][n - 1]}: "
                         f"{problem}")
    return died, wrong

# ---- several processes

def several(arguments, faults):
    """Children that are the processes of one run, each with its fault."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(faults))}
    return [Child(arguments, fault, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, fault in enumerate(faults)]

def die_at_step(n):
    def fault():
        count, real = itertools.count(1), torch.optim.AdamW.step

        def step(*args, **kwargs):
            if next(count) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        torch.optim.AdamW.step = step
    return fault

# ---- damaged files

def spoil(path, rng, how=None):
    """One random corruption of a file; returns its name."""
    raw = bytearray(path.read_bytes())
    how = how or rng.choices(("flip", "truncate", "zeros", "missing"), (12, 4, 3, 1))[0]
    if how == "flip":
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del raw[rng.randrange(len(raw)):]
    elif how == "zeros":
        at = rng.randrange(len(raw))
        raw[at:at + 64] = bytes(len(raw[at:at + 64]))
    path.unlink()
    if how != "missing":
        path.write_bytes(raw)
    return how

def quietly(main, arguments):
    """(exit code, stdout, stderr without progress bars) of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(a) for a in arguments])
    lines = err.getvalue().replace("\r", "\n").split("\n")
    return code, out.getvalue(), "\n".join(line for line in lines if line.strip() and "%|" not in line)

# kind of file -> (its names, the run it is spoilt in, the command that reads it)
KINDS = {
    "run.json": ("run.json", "done", "eval"), "corpus arrays": ("corpus-*/*.bin", "done", "eval"),
    "corpus meta": ("corpus-*/meta.json", "done", "eval"),
    "corpus names": ("corpus-*/names.json", "done", "eval"),
    "tokenizer": ("corpus-*/vocab.txt", "done", "eval"), "tome.pt": ("tome.pt", "done", "eval"),
    "qa.pt": ("qa.pt", "done", "eval qa"), "memory meta": ("memory-*/meta.json", "done", "eval"),
    "memory arrays": ("memory-*/*.npy", "done", "eval"),
    "batch-tome.pt": ("batch-tome.pt", "memory", "memory"),
    "tome.pt, half trained": ("tome.pt", "half a tome", "tome"),
    "log.jsonl": ("log.jsonl", "half a tome", "tome")}

def command_of(how, world, out):
    """(exit code, result, stderr) of eval.py or of a stage."""
    if how.startswith("eval"):
        more = ["--task", "qa", "--examples", world / "qa.train.jsonl"] if how == "eval qa" else []
        return quietly(evaluation.main, ["--out", out, "--json", *more])
    code, _, err = quietly(train.main, command(how, world, out))
    result = contents(out) if code == 0 else {}
    result.pop("log.jsonl", None)           # a record, read by nobody
    return code, result, err

def files_of(out):
    return {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

def corruptions(reference, kind, n, rng):
    """n random corruptions of a kind of file: how many were found, how many had no effect, what
    went wrong."""
    pattern, where, how = KINDS[kind]
    expected = reference.says(where, how)
    found, harmless, wrong = 0, 0, []
    for _ in range(n):
        out = reference.fresh(reference.spoilt_in[where])
        path = rng.choice(sorted(out.glob(pattern)))
        what = f"{path.relative_to(out)}, {spoil(path, rng)}"
        before = files_of(out)
        try:
            code, result, err = command_of(how, reference.folder, out)
        except BaseException:
            wrong.append(f"{what}: {traceback.format_exc()[-600:]}")
            continue
        if code == 0 and equal(result, expected):
            harmless += 1
            continue
        found += code != 0
        named = path.name in err or path.parent != out and path.parent.name in err
        if code == 0:
            wrong.append(f"{what}: another result, and nothing was said")
        elif code != 1 or err.strip().count("\n") or not named:
            wrong.append(f"{what}: {code}, {err}")
        elif before != files_of(out):
            wrong.append(f"{what}: something was overwritten")
    return found, harmless, wrong

# ---- odd settings

ODD = {int: "-1 0 1 3 7 16 63 64 96 1000 10000 1000000 1000001 99999999999999999999 1.5 x",
       float: "-1 -0.0 0 1e-30 0.001 0.3 0.999 1 1.001 2 1e30 1e999 inf -inf nan x", str: "float32 none x"}

def odd_settings(reference):
    """Every setting at the values ODD of its type, then one step of batch-tome in a new folder: how many were
    refused, and how many trained; what went wrong. A refusal is a sentence, and leaves nothing behind."""
    counts, wrong = Counter(), []
    for name, kind in train.SETTABLE.items():
        for value in ODD[kind].split():
            out = reference.folder / "spoilt"
            shutil.rmtree(out, ignore_errors=True)
            arguments = command("batch-tome", reference.folder, out, "--steps", "1", "--set", f"{name}={value}")
            try:
                code, said = Child(arguments).wait(60)
            except AssertionError as error:         # it hangs
                code, said = None, str(error)
            how = {0: "trained", 1: "refused", 2: "refused"}.get(code, "wrong")
            if how == "wrong" or "Traceback" in said or how == "refused" and out.exists():
                how = "wrong"
                wrong.append(f"--set {name}={value}: {code}, {said[-500:]}")
            counts[how] += 1
    return counts, wrong

# ---- bad lines

def mutated_lines(good):
    """A hypothesis strategy: lines (bytes) that were made from the records `good` and then spoilt."""
    from hypothesis import strategies as st
    odd = ["\ud800", "\x00", "[MASK]", "\u2028", "e\u0301", "SUPPORTS", "", " ", "\U0001f600"]
    scalars = (st.none() | st.booleans() | st.integers() | st.integers(10 ** 30, 10 ** 40) | st.floats() | st.text()
               | st.sampled_from(odd))
    junk = st.recursive(scalars, lambda inner: (st.lists(inner, max_size=3)
                                                | st.dictionaries(st.text(max_size=8), inner, max_size=3)), max_leaves=6)
    junk |= st.integers(2, 300).map(nested)

    @st.composite
    def line(draw):
        record = json.loads(json.dumps(draw(st.sampled_from(good))))
        for _ in range(draw(st.integers(0, 3))):
            place = record
            while True:                                     # walk to a random place, change what is there
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                if not keys:
                    break
                key = draw(st.sampled_from(keys))
                if isinstance(place[key], dict | list) and draw(st.booleans()):
                    place = place[key]
                    continue
                what = draw(st.integers(0, 3))
                if what == 0:
                    del place[key]
                elif what == 1 and type(place[key]) is int:
                    place[key] += draw(st.integers(-9, 9))
                elif what == 2 and isinstance(place, list):
                    place.append(place[key])
                else:
                    place[key] = draw(junk)
                break
        try:
            raw = bytearray(json.dumps(record, ensure_ascii=draw(st.booleans())).encode())
        except UnicodeEncodeError:                          # half a surrogate pair, not escaped
            raw = bytearray(json.dumps(record).encode())
        for _ in range(draw(st.integers(0, 2)) * draw(st.booleans())):
            at = draw(st.integers(0, len(raw)))
            raw[at:at + draw(st.integers(0, 4))] = draw(st.binary(max_size=3))
        return bytes(raw).removeprefix(b"\x1f\x8b")          # that would be a gzip file
    return line()

def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value

def fuzz_corpus(folder, lines, tokenizer):
    """Reads these lines as a corpus file, builds what is left: (kept, reported, empty). Each line is one of them."""
    path = folder / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    lines = path.read_bytes().split(b"\n")
    errors = []
    kept = list(data.read_corpus(path, errors))
    numbers = [int(e.removeprefix(f"{path}:").split(":")[0]) for e in errors]
    assert numbers == sorted(set(numbers)) and all("\n" not in e for e in errors), errors
    empty = sum(not line.decode(errors="ignore").strip() and n not in numbers for n, line in enumerate(lines, 1))
    assert len(kept) + len(errors) + empty == len(lines), (len(kept), errors, lines)
    if errors:
        try:
            list(data.read_corpus(path))
            raise AssertionError("a bad line was passed over")
        except data.UserError as error:
            assert str(error).startswith(f"{path}:{numbers[0]}: ")
    for n in sorted(numbers, reverse=True):
        del lines[n - 1]
    path.write_bytes(b"\n".join(lines))
    shutil.rmtree(folder / "corpus", ignore_errors=True)
    try:
        corpus = data.Corpus.build(path, folder / "corpus", tokenizer, 32, 48)
    except data.UserError as error:
        assert "no linked mention" in str(error) and not any(m.entity for text in kept for m in text.mentions) or not kept
        return len(kept), len(errors), empty
    counts = corpus.meta["counts"]
    assert counts["texts"] == len(kept)
    assert counts["mentions_read"] == sum(len(t.mentions) for t in kept)
    assert counts["mentions_read"] == counts["mentions"] + sum(corpus.meta["dropped"].values())
    rng, batch = np.random.default_rng(0), data.corpus_batch(corpus, range(len(corpus.article)))
    data.mask_batch(data.sample_mentions(batch, 4, rng), corpus, rng)
    return len(kept), len(errors), empty

def fuzz_example(folder, line, task, tokenizer, entity_index):
    """Reads this line as a file of examples; returns (kept, reported, empty)."""
    path = folder / "fuzz.jsonl"
    path.write_bytes(line)
    lines = line.split(b"\n")
    try:
        examples = data.read_examples(path, task)
    except data.UserError as error:
        said = str(error)
        assert "\n" not in said and (said.startswith(f"{path}:") and (said[len(str(path)) + 1].isdigit()
                                                                     or not line.decode().strip())), said
        return (0, 0, 1) if "holds no" in said else (0, 1, 0)
    assert len(examples) == sum(bool(part.decode().strip()) for part in lines)
    examples = [e._replace(mentions=e.mentions or []) for e in examples]        # where none are given, none are found
    batch = data.example_batch(examples, task, tokenizer, entity_index, max_length=48)
    assert batch.tokens.shape[1] <= 48 and len(batch.tokens) == len(examples)
    return 1, 0, 0

def fuzz(folder, n):
    """At least n mutated lines, half of corpora, a quarter of each task: {what: Counter}. Needs hypothesis."""
    from hypothesis import HealthCheck, given, settings, strategies as st
    lines, examples = toy_world()
    tokenizer = data.train_tokenizer((line["text"] for line in lines[:300]), 400)
    entity_index = {name: i for i, name in enumerate(["", *sorted({line["title"] for line in lines[:300]})])}
    counts = {}

    def count(what, result):
        counts.setdefault(what, Counter()).update(dict(zip(("kept", "reported", "empty"), result)))

    per = 8
    options = dict(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))

    @settings(max_examples=-(-n // 2 // per), **options)
    @given(st.lists(mutated_lines(lines[:50]), min_size=per, max_size=per))
    def corpus(bad):
        count("corpus", fuzz_corpus(folder, bad, tokenizer))
    corpus()
    for task in ("claims", "qa"):
        @settings(max_examples=-(-n // 4), **options)
        @given(mutated_lines(examples[f"{task}.one_hop.train"][:20]))
        def example(bad):
            count(task, fuzz_example(folder, bad, task, tokenizer, entity_index))
        example()
    return counts

# ---- memory

def resident():
    """Megabytes that are this process's own: not mapped files, which the system takes back when it wants."""
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

def n_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

def leak(reference, steps=5000):
    """(Own memory in MB, number of tensors) after a fifth of the steps of a training run, after half and at its end."""
    out, seen, count = reference.fresh("batch-tome"), [], itertools.count(1)
    real = torch.optim.AdamW.step

    def step(*args, **kwargs):
        n = next(count)
        if n in (steps // 5, steps // 2, steps):
            gc.collect()
            seen.append((round(resident(), 1), n_tensors()))
        return real(*args, **kwargs)

    schedule = {**MICRO["schedule"], "batch-tome": train.Schedule(steps, 1e-3, 10, 2)}
    train.PRESETS["toy"] = {**MICRO, "schedule": schedule, "cluster": 2, "log_every": steps // 10,
                            "save_every": steps // 10}
    torch.optim.AdamW.step = step
    try:
        code, _, err = quietly(train.main, command("batch-tome", reference.folder, out))
    finally:
        torch.optim.AdamW.step = real
        train.PRESETS["toy"] = MICRO
    assert code == 0, err
    return seen

# ---- the campaign

def campaign(parts, every=1, n_corruptions=100, n_lines=2400):
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    rng, wrong, started = random.Random(0), [], time.time()

    def title(text):
        print(f"{time.time() - started:5.0f} s  {text}", flush=True)

    reference = Reference(folder / "reference")
    shrink()
    for part, fault, what in (("kill", die_at, "SIGKILL before file operations"),
                              ("term", stop_at, "SIGTERM before file operations"),
                              ("power", power_cut_at, "power cuts at file operations")):
        if part in parts:
            title(f"{what}, every one" + (f" of {every}" if every > 1 else ""))
            for stage in STAGES:
                n = len(reference.operations[stage])
                died, bad = kills(reference, stage, fault, range(1, n + 1, every))
                wrong += bad
                title(f"  {stage}: {n} operations, {died} ended early, {died - len(bad)} of these and the same "
                      "command again as if nothing had happened")
    if "settings" in parts:
        title("settings: each one of --set at values of its type, good and bad, and a training step with it")
        counts, bad = odd_settings(reference)
        wrong += bad
        title(f"  {sum(counts.values())} values: " + ", ".join(f"{n} {how}" for how, n in counts.items()))
    if "corrupt" in parts:
        title(f"damaged files, {n_corruptions} of each kind: bits flipped, cut off, overwritten with zeros, missing")
        for kind in KINDS:
            found, harmless, bad = corruptions(reference, kind, n_corruptions, rng)
            wrong += bad
            title(f"  {kind}: {found} found, {harmless} without effect, {len(bad)} wrong")
    if "fuzz" in parts:
        counts = fuzz(folder, n_lines)
        title(f"{sum(sum(c.values()) for c in counts.values())} mutated lines")
        for what, c in counts.items():
            title(f"  {what}: " + ", ".join(f"{n} {how}" for how, n in c.items()))
    if "leak" in parts:
        title("5,000 steps: own memory after 1,000, 2,500 and 5,000 of them")
        title(f"  {leak(reference)} (MB, tensors)")
    shutil.rmtree(folder)
    print("\n".join(wrong) or "nothing lost")
    return bool(wrong)

if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    words = [word for word in sys.argv[1:] if not word.isdecimal()]
    sys.exit(campaign(words or ("kill", "term", "power", "settings", "corrupt", "fuzz", "leak"), *numbers))
