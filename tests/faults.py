"""Injects faults into a run: kills, power cuts, damaged files, bad lines.

    python tests/faults.py                 the whole campaign, with its figures (hours on one core)
    python tests/faults.py kill corrupt    parts: kill, power, data, term, corrupt, fuzz, leak
    python tests/faults.py kill tome 10    one stage only, and every tenth file operation

tests/test_faults.py runs a few faults of each kind. Every command trains a tiny model in a forked
child process. After the fault, the same command runs again. The folder is then compared, byte by
byte, with that of an undisturbed run."""
import copy
import gc
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
import eval as evaluation
import memory
import train

SCHEDULE = dict.fromkeys(("batch-tome", "tome", "claims", "qa"), train.Schedule(4, 1e-3, 1, 8))
MICRO = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 1, "n_upper": 1, "cluster": 8,
         "log_every": 3, "save_every": 2, "eval_mentions": 6, "fit_passages": 64, "key_dim": 16,
         "value_dim": 16, "coref_dim": 16, "vocab": 600, "k": 8, "k_shard": 8, "k_answer": 8,
         "k_answer_shard": 8, "k_finetune": 16, "dropout": 0.1, "schedule": SCHEDULE}
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])     # imports half of PyTorch before a fork

def shrink(patch):
    """Makes this process use a tiny model, shards and toy world. patch: a pytest.MonkeyPatch."""
    patch.setitem(train.PRESETS, "toy", MICRO)
    patch.setattr(memory, "PASSAGES_PER_SHARD", 64)
    patch.setattr(data, "COUNTS", dict.fromkeys(data.COUNTS, 10))

# The commands of a run, in order. {} stands for the folder of the reference run.
STAGES = {"batch-tome": "--stage batch-tome", "memory": "--stage memory", "tome": "--stage tome",
          "tome-2": "--stage tome --blocks 2", "qa": "--stage finetune --task qa",
          "append": "--stage memory --append {}/more.jsonl",
          "append again": "--stage memory --append {}/other.jsonl --replace",
          "from": "--stage tome --from {}/done/run --entity-weight 0.3"}

def command(stage, reference, out, *more):
    """The arguments of train.py for one of STAGES."""
    words = STAGES[stage].format(reference).split()
    return [str(word) for word in (*words, "--out", out, "--quiet", *more)]

# ---- Children ------------------------------------------------------------------------------------

class Child:
    """A forked process that calls fault(), then train.main(arguments). It writes to a file."""
    limit = 120                 # seconds; a command that takes longer counts as hanging

    def __init__(self, arguments, fault=lambda: None, environment={}):
        self.said = tempfile.TemporaryFile("w+")
        self.process = multiprocessing.get_context("fork").Process(
            target=self.work, args=(arguments, fault, environment))
        self.process.start()

    def work(self, arguments, fault, environment):
        for number, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(self.said.fileno(), number)
            setattr(sys, name, open(number, "w", closefd=False))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        shrink(pytest.MonkeyPatch())
        fault()
        sys.exit(train.main(arguments))

    def wait(self, limit=None):
        """(exit code, or minus the signal's number; the output)."""
        limit = limit or self.limit
        self.process.join(limit)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"hangs: not done after {limit} s")
        self.said.seek(0)
        return self.process.exitcode, self.said.read()

def run(arguments, fault=lambda: None, **more):
    return Child(arguments, fault, **more).wait()

def several(arguments, faults):
    """Child processes that work on one run, each with its fault. None: a process never starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(faults))}
    return [Child(arguments, fault, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, fault in enumerate(faults) if fault]

def quietly(main, arguments):
    """(exit code, stdout, stderr without progress bars) of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(a) for a in arguments])
    lines = err.getvalue().replace("\r", "\n").split("\n")
    lines = [line for line in lines if line.strip() and "%|" not in line]
    return code, out.getvalue(), "\n".join(lines)

def refused(result, *words):
    """Asserts that a command ended with status 1 and one sentence that contains all words."""
    code, _, err = result
    assert code == 1 and err.count("\n") == 0, (code, err)
    assert all(str(word) in err for word in words), err

# ---- File operations -----------------------------------------------------------------------------

def path_of(name, folder_fd=-1):
    """The absolute path of an audit event's name, which may be relative to an open folder."""
    name = os.fsdecode(name)
    if folder_fd is not None and folder_fd >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), name)
    return os.path.abspath(name)

def watch_operations(before):
    """From now on, calls before(what, *paths) before each file operation: "open" (for writing),
    "rename", "link", "remove", "mkdir", "rmdir", "symlink", "truncate", "fsync" and "exit"."""
    real, leave, is_busy = os.fsync, os._exit, []

    def tell(what, *paths):
        if not is_busy:                 # operations of `before` itself are ignored
            is_busy.append(True)
            before(what, *paths)
            is_busy.clear()

    def hook(event, args):
        if event == "open" and isinstance(args[2], int) and isinstance(args[0], (str, bytes)):
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                tell("open", path_of(args[0]))
        elif event in ("os.rename", "os.link"):
            tell(event[3:], path_of(args[0], args[2]), path_of(args[1], args[3]))
        elif event in ("os.remove", "os.mkdir", "os.rmdir", "os.symlink"):
            tell(event[3:], path_of(args[0], args[-1]))
        elif event == "os.truncate":
            tell("truncate", path_of(args[0]))

    def fsync(fd):
        tell("fsync", os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    def leaves(code):
        tell("exit", os.getcwd())
        leave(code)
    os.fsync, os._exit = fsync, leaves
    sys.addaudithook(hook)

def tear(path):
    """Truncates a temporary file to its half, or cuts the end off the log's last line, as if a kill
    had interrupted the writing."""
    if path.endswith((".tmp", ".jsonl")) and os.path.exists(path):
        size = os.path.getsize(path)
        os.truncate(path, size // 2 if path.endswith(".tmp") else max(0, size - 9))

def signal_at(n, number=signal.SIGKILL):
    """A fault: sends this signal before the n-th file operation."""
    def fault():
        count = itertools.count(1)

        def before(what, *paths):
            if next(count) == n:
                if what == "fsync" and number == signal.SIGKILL:
                    tear(paths[0])
                os.kill(os.getpid(), number)
        watch_operations(before)
    return fault

def before_call(real, do, *numbers):
    """The function `real`, but do(arguments) is called before its calls with these numbers (before
    all calls, if no numbers are given)."""
    count = itertools.count(1)

    def call(*args, **kwargs):
        if not numbers or next(count) in numbers:
            do(*args)
        return real(*args, **kwargs)
    return call

def signal_at_call(n, owner, name, number=signal.SIGKILL):
    """A fault: sends this signal before the n-th call of the function owner.name."""
    def fault():
        real = getattr(owner, name)
        setattr(owner, name, before_call(real, lambda *_: os.kill(os.getpid(), number), n))
    return fault

def die_at_step(n):
    """A fault: SIGKILL before the n-th step of the optimizer."""
    return signal_at_call(n, torch.optim.AdamW, "step")

class Journal:
    """The changes that a power cut would undo: to contents of files since their last fsync, and to
    names since the last fsync of their folder."""

    def __init__(self):
        self.written = {}           # file -> its durable content (None: it has none)
        self.names = []             # [operation, name, earlier name, content replaced]

    def note(self, what, first, last):
        """Records an operation that is about to happen."""
        if what in ("open", "truncate"):
            if not os.path.exists(first):
                self.names.append(["made", first, None, None])
                self.written[first] = None
            elif os.path.isfile(first):
                self.written.setdefault(first, Path(first).read_bytes())
        elif what == "fsync":
            self.written.pop(first, None)
            self.names = [entry for entry in self.names if os.path.dirname(entry[1]) != first]
        elif what in ("mkdir", "link", "symlink") and not os.path.exists(last):
            self.names.append(["made", last, None, None])
        elif what == "remove" and os.path.isfile(first):
            self.names.append(["removed", first, None, Path(first).read_bytes()])
        elif what == "rename" and os.path.exists(first):
            replaced = Path(last).read_bytes() if os.path.isfile(last) else None
            self.move(first, last)
            self.names.append(["renamed", last, first, replaced])

    def move(self, first, last):
        """Records that `first`, with everything in it, is now called `last`."""
        def moved(path):
            is_inside = path == first or path.startswith(first + "/")
            return last + path[len(first):] if is_inside else path
        self.written = {moved(path): content for path, content in self.written.items()}
        for entry in self.names:
            entry[1] = moved(entry[1])

    def lose(self, place, copied, names_survive):
        """Simulates a power cut in `copied`, a copy of the folder `place`."""
        journal = copy.deepcopy(self)
        journal.move(str(place), str(copied))
        for path, content in journal.written.items():
            if os.path.exists(path):
                Path(path).write_bytes(content or b"")
        while journal.names and not names_survive:
            how, path, source, content = journal.names.pop()
            if how == "made" and os.path.isdir(path):
                shutil.rmtree(path)
            elif how == "made" and os.path.lexists(path):
                os.unlink(path)
            elif how == "renamed" and os.path.exists(path):
                source = str(copied) + source[len(str(place)):]
                os.rename(path, source)
                journal.move(path, source)
            if content is not None and os.path.isdir(os.path.dirname(path)):
                Path(path).write_bytes(content)

def snapshots(place, states, fault, chosen):
    """A "fault" that only observes. Before each chosen file operation it copies the folder `place`
    to states/NUMBER, in the state in which a kill ("kill") or a power cut would leave it. A power
    cut loses everything that is not durable ("power") or, as on most file systems, only contents
    ("data"). A new file states/list names the operations."""
    def install():
        journal, count = Journal(), itertools.count(1)
        names = os.open(states / "list", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def before(what, *paths):
            n = next(count)
            os.write(names, f"{what} {os.path.relpath(paths[0], place)}\n".encode())
            if n in chosen:
                copied = states / str(n)
                shutil.copytree(place, copied)
                if fault != "kill":
                    journal.lose(place, copied, names_survive=fault == "data")
                elif what == "fsync":
                    tear(str(copied / os.path.relpath(paths[0], place)))
            journal.note(what, paths[0], paths[-1])
        watch_operations(before)
    return install

# ---- Comparing -----------------------------------------------------------------------------------

def contents(out):
    """{file: its bytes}. The log's value is {(stage, step): record without the time}, since a crash
    may repeat a line or cut it."""
    held = {}
    for path in sorted(p for p in Path(out).rglob("*") if p.is_file()):
        name = str(path.relative_to(out))
        held[name] = path.read_bytes()
        if name == "log.jsonl":
            records = {}
            for line in held[name].splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    records[record["stage"], record["step"]] = record | {"seconds": 0}
            held[name] = records
    return held

def log_of(out):
    """The records of log.jsonl."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]

def weights(path):
    return torch.load(path, weights_only=True)["model"]

def difference(out, expected):
    """The names of files that differ from `expected`, are missing, or are not expected."""
    found = contents(out)
    return sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))

class Reference:
    """An undisturbed run. before[stage] is a copy of its folder before the stage, after[stage] the
    contents after it, operations[stage] the stage's file operations, and results[…] the output of
    commands. `whole` is the finished run, in before["done"]. before["half a tome"] is the run with
    stage tome at step 3 of 4."""

    def __init__(self, folder):
        self.folder, self.whole = folder, folder / "done/run"
        folder.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            shrink(patch)
            lines, _ = data.toy_world(5)
        titles = sorted({line["title"] for line in lines})
        for name, chosen in (("more", titles[:8]), ("other", titles[4:10])):
            data.write_lines(folder / f"{name}.jsonl", (x for x in lines if x["title"] in chosen))
        self.before, self.after, self.operations, self.results = {}, {}, {}, {}
        place = folder / "place"
        for stage in STAGES:
            if stage == "from":
                self.before["done"] = place.rename(folder / "done")
            self.before[stage] = folder / f"before {stage}"
            place.mkdir(exist_ok=True)
            shutil.copytree(place, self.before[stage])
            states = Path(tempfile.mkdtemp(dir=folder))
            code, said = run(command(stage, folder, place / "run"),
                             snapshots(place, states, "kill", ()))
            assert code == 0, said
            self.operations[stage] = (states / "list").read_text().splitlines()
            self.after[stage] = contents(place / "run")
        half = self.fresh("tome")
        run(command("tome", folder, half), die_at_step(4))
        self.before["half a tome"] = half.parent.rename(folder / "half a tome")

    def fresh(self, name):
        """Copies before[name], for a test to damage; returns the run folder in the copy."""
        place = self.folder / "spoilt"
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(self.before[name], place)) / "run"

def finish(reference, stage, out):
    """Runs the same command again after a fault. Returns what went wrong, or None."""
    code, said = run(command(stage, reference.folder, out))
    if code:
        return said[-500:]
    differs = difference(out, reference.after[stage])
    return f"{differs} differ" if differs else None

def after_signal(reference, stage, n, number):
    """Sends a real signal before the stage's n-th file operation, then runs the command again."""
    out = reference.fresh(stage)
    code, said = run(command(stage, reference.folder, out), signal_at(n, number))
    # After SIGTERM, a command whose work was already done ends with 0.
    if code not in ((-signal.SIGKILL,) if number == signal.SIGKILL else (0, 130)):
        return f"ended with {code}: {said[-500:]}"
    return finish(reference, stage, out)

def after_states(reference, stage, fault, chosen):
    """Runs the same command again in each folder that a kill or power cut at the chosen operations
    leaves behind. Returns (number of different folders, what went wrong)."""
    out = reference.fresh(stage)
    states, wrong, done = Path(tempfile.mkdtemp(dir=reference.folder)), [], {}
    code, said = run(command(stage, reference.folder, out),
                     snapshots(out.parent, states, fault, set(chosen)))
    assert code == 0, said
    for n in chosen:
        place = states / str(n)
        held = [str(p.relative_to(place)) + str(p.is_file() and zlib.crc32(p.read_bytes()))
                for p in sorted(place.rglob("*"))]
        is_last = n == len(reference.operations[stage])     # the work of the command is done
        key = "\n".join([*held, str(is_last)])
        if key not in done:
            lost = is_last and difference(place / "run", reference.after[stage])
            done[key] = f"{lost} lost" if lost else finish(reference, stage, place / "run")
        if done[key]:
            wrong.append(f"{stage}, {fault} {n}, {reference.operations[stage][n - 1]}: {done[key]}")
        shutil.rmtree(place)
    return len(done), wrong

# ---- Damaged and forged files --------------------------------------------------------------------

# kind of file -> (its names, the folder in which it is damaged, the command that reads it)
KINDS = {"run.json": ("run.json", "done", "eval"), "corpus": ("corpus/*", "qa", "qa"),
         "memory": ("memory/*", "tome", "tome"),
         "world": ("world/qa.one_hop.[dt][er][av]*", "qa", "qa"),       # train and dev
         "appended corpus": ("appended-0002/corpus/*", "done", "eval"),
         "appended memory": ("appended-0002/memory/*", "done", "eval"),
         "meta.json": ("appended-0002/*/meta.json", "done", "eval"),
         "batch-tome.pt": ("batch-tome.pt", "memory", "memory"),
         "tome-1.pt": ("tome-1.pt", "done", "eval"), "qa-1.pt": ("qa-1.pt", "done", "eval qa"),
         "tome-1.pt, half trained": ("tome-1.pt", "half a tome", "tome"),
         "log.jsonl": ("log.jsonl", "half a tome", "tome")}
ODD = [None, True, -1, 0, 1.5, 10 ** 30, -1e300, float("nan"), "x", [], {}, [[1]]]

def places_in(value):
    """Yields (dictionary or list, key) for every value in nested dictionaries and lists."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places_in(value[key])

def forge(path, rng):
    """Replaces or removes a value in a JSON file, or in "about" of a checkpoint, with correct
    checksums. Returns what was done."""
    checkpoint = torch.load(path, weights_only=True) if path.suffix == ".pt" else None
    whole = json.loads(checkpoint["about"] if checkpoint else path.read_text())
    place, key = rng.choice([*places_in(whole)])
    place[key] = value = rng.choice([*ODD, "removed"])
    if value == "removed":
        del place[key]
    if checkpoint:
        torch.save(checkpoint | {"about": json.dumps(whole)}, path)
    else:
        path.write_text(json.dumps(whole))
    return f"forged {key!r}: {value!r}"

def spoil(path, rng, how=None):
    """Corrupts a file at random, or forges a value in it. Returns what was done."""
    raw, ways = bytearray(path.read_bytes()), {"flip": 12, "truncate": 4, "zeros": 3, "missing": 1}
    if path.suffix in (".json", ".pt") and path.name != "names.json":
        ways["forge"] = 20
    how = how or rng.choices([*ways], [*ways.values()])[0]
    at = rng.randrange(len(raw))
    if how == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del raw[at:]
    elif how == "zeros":
        raw[at:at + 64] = bytes(len(raw[at:at + 64]))
    elif how == "forge":
        return forge(path, rng)
    path.unlink()                           # it may be a link
    if how != "missing":
        path.write_bytes(raw)
    return how

def result_of(how, reference, out):
    """(exit code, result, stderr) of eval.py or of a stage of train.py."""
    if how.startswith("eval"):
        task = ["--task", "qa"] if how == "eval qa" else []
        return quietly(evaluation.main, ["--out", out, "--json", *task])
    code, _, err = quietly(train.main, command(how, reference.folder, out))
    held = contents(out) if code == 0 else {}
    held.pop("log.jsonl", None)         # no command reads it
    return code, held, err

def corruptions(reference, kind, n, rng):
    """Makes n random corruptions of a kind of file. Returns a Counter of their effects, and what
    went wrong. A forged value is harmless if it is a different setting that also works."""
    pattern, where, how = KINDS[kind]
    if (where, how) not in reference.results:
        reference.results[where, how] = result_of(how, reference, reference.fresh(where))
    _, expected, _ = reference.results[where, how]
    counts, wrong = Counter(), []
    for _ in range(n):
        out = reference.fresh(where)
        path = rng.choice(sorted(out.glob(pattern)))
        done = spoil(path, rng)
        before = contents(out)
        try:
            code, result, err = result_of(how, reference, out)
        except BaseException:
            code, err = 99, traceback.format_exc()[-600:]
        named = path.name in err or path.parent != out and path.parent.name in err
        if code == 0 and (result == expected or done.startswith("forged")):
            counts["harmless"] += 1
        elif code == 1 and named and not err.strip().count("\n") and not difference(out, before):
            counts["found"] += 1
        else:
            counts["wrong"] += 1
            wrong.append(f"{path.relative_to(out)}, {done}: {code}, {err}")
    return counts, wrong

# ---- Bad lines -----------------------------------------------------------------------------------

ODD_TEXT = ["", " ", "[MASK]", "SUPPORTS", "\ud800", "\x00", "\u2028", "e\u0301", "\U0001f600"]

def mutated(rng, record):
    """A line (bytes) made from a record, with up to three changes, and sometimes odd bytes."""
    record = json.loads(json.dumps(record))
    for _ in range(rng.randrange(4)):
        place, key = rng.choice([*places_in(record)] or [(record, "text")])
        what = rng.randrange(4) if record else 3
        if what == 0:
            del place[key]
        elif what == 1 and type(place[key]) is int:
            place[key] += rng.randint(-9, 9)
        elif what == 2 and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = rng.choice(ODD + ODD_TEXT)
    escaped = rng.random() < 0.5
    raw = bytearray(json.dumps(record, ensure_ascii=escaped).encode("utf-8", "surrogatepass"))
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(raw))
        raw[at:at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    return bytes(raw).removeprefix(b"\x1f\x8b")             # which would be a gzip file

def fuzz_corpus(folder, lines, tokenizer):
    """Reads these lines as a corpus file and checks that each is kept, reported with its number, or
    empty. Then tokenises the lines that were kept. Returns a Counter."""
    path, errors = folder / "fuzz.jsonl", []
    path.write_bytes(b"\n".join(lines))
    lines = path.read_bytes().split(b"\n")
    kept = list(data.read_corpus(path, errors))
    numbers = [int(e.removeprefix(f"{path}:").split(":")[0]) for e in errors]
    assert numbers == sorted(set(numbers)) and all("\n" not in e for e in errors), errors
    empty = sum(not line.decode(errors="ignore").strip() and n not in numbers
                for n, line in enumerate(lines, 1))
    assert len(kept) + len(errors) + empty == len(lines), (len(kept), errors, lines)
    path.write_bytes(b"\n".join(line for n, line in enumerate(lines, 1) if n not in numbers))
    shutil.rmtree(folder / "corpus", ignore_errors=True)
    with suppress(data.UserError):                          # no linked mention
        corpus = data.Corpus.build(path, folder / "corpus", tokenizer, 32, 48)
        counts, dropped = corpus.meta["counts"], sum(corpus.meta["dropped"].values())
        assert counts["texts"] == len(kept)
        assert counts["mentions_read"] == sum(len(t.mentions) for t in kept)
        assert counts["mentions_read"] == counts["mentions"] + dropped
        rng, batch = np.random.default_rng(0), data.corpus_batch(corpus, range(len(corpus.article)))
        data.mask_batch(data.sample_mentions(batch, 4, rng), corpus, rng)
    return Counter(kept=len(kept), reported=len(errors), empty=empty)

def fuzz_example(folder, line, task, tokenizer, entity_index):
    """Reads this line as a file of examples; it is kept or reported. Returns a Counter."""
    path = folder / "fuzz.jsonl"
    path.write_bytes(line)
    try:
        examples = data.read_examples(path, task)
    except data.UserError as error:
        assert "\n" not in str(error) and str(error).startswith(f"{path}:")
        return Counter(reported=1)
    examples = [e._replace(mentions=e.mentions or []) for e in examples]
    batch = data.example_batch(examples, task, tokenizer, entity_index, max_length=48)
    assert batch.tokens.shape[1] <= 48 and len(batch.tokens) == len(examples)
    return Counter(kept=1)

def fuzz(folder, n):
    """Reads n mutated lines: half from a corpus, a quarter per task. Returns {what: Counter}."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        lines, examples = data.toy_world(3)
    tokenizer = data.train_tokenizer((line["text"] for line in lines), 400)
    index = {name: i for i, name in enumerate(["", *sorted({line["title"] for line in lines})])}
    counts, rng = {what: Counter() for what in ("corpus", "claims", "qa")}, random.Random(0)
    for _ in range(n // 16):
        bad = [mutated(rng, rng.choice(lines[:50])) for _ in range(8)]
        counts["corpus"] += fuzz_corpus(folder, bad, tokenizer)
    for task in ("claims", "qa"):
        for _ in range(n // 4):
            line = mutated(rng, rng.choice(examples[f"{task}.one_hop.train"][:20]))
            counts[task] += fuzz_example(folder, line, task, tokenizer, index)
    return counts

# ---- Leaks ---------------------------------------------------------------------------------------

def leak(reference, steps):
    """[(memory in MB, number of tensors)] after a fifth and three quarters of the training steps,
    and at the end. The fit is between the first two. After it, more layers have gradients and
    optimizer states."""
    out, seen = reference.fresh("batch-tome"), []

    def measure(*_):
        gc.collect()
        n = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        own = next(x for x in open("/proc/self/status") if x.startswith("RssAnon"))
        seen.append((round(int(own.split()[1]) / 1024, 1), n))

    step = before_call(torch.optim.AdamW.step, measure, steps // 5, steps * 3 // 4, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        code, _, err = quietly(train.main, command(
            "batch-tome", reference.folder, out, "--steps", steps, "--batch", 2, "--cluster", 2,
            "--log-every", steps // 10, "--save-every", steps // 10))
    assert code == 0, err
    return seen

# ---- The campaign --------------------------------------------------------------------------------

def campaign(parts, every=1, n_corruptions=100, n_lines=2400):
    torch.set_num_threads(1)
    Child.limit = 3600                          # since other work runs at the same time
    stages = [stage for stage in STAGES if stage in parts] or [*STAGES]
    folder, rng, all_wrong, started = Path(tempfile.mkdtemp()), random.Random(0), [], time.time()

    def say(text, counts={}, wrong=()):
        counts = "".join(f", {n} {how}" for how, n in counts.items())
        print(f"{time.time() - started:5.0f} s  {text}{counts}", flush=True)
        print("".join(f"        WRONG {what}\n" for what in wrong), end="", flush=True)
        all_wrong.extend(wrong)

    reference = Reference(folder / "reference")
    for part, stage in itertools.product(("kill", "power", "data"), stages):
        if part in parts:
            chosen = [*range(1, len(reference.operations[stage]) + 1, every)]
            n, wrong = after_states(reference, stage, part, chosen)
            say(f"{part}, {stage}: {len(chosen)} file operations, {n} different folders, "
                f"{len(chosen) - len(wrong)} resumed to the same bytes", wrong=wrong)
    for number, stage in itertools.product((signal.SIGKILL, signal.SIGTERM), stages):
        if "term" in parts:
            chosen = rng.sample(range(1, len(reference.operations[stage])), 10)
            ends = {n: after_signal(reference, stage, n, number) for n in chosen}
            wrong = [f"{stage}, {n}: {end}" for n, end in ends.items() if end]
            say(f"signal {number} to the process, {stage}: {10 - len(wrong)} of 10", wrong=wrong)
    shrink(pytest.MonkeyPatch())
    for kind in KINDS if "corrupt" in parts else ():
        say(f"damaged or forged {kind}", *corruptions(reference, kind, n_corruptions, rng))
    for what, counts in fuzz(folder, n_lines).items() if "fuzz" in parts else ():
        say(f"mutated lines of {what}", counts)
    if "leak" in parts:
        say(f"leak: {leak(reference, 5000)} (MB, tensors; after 1,000, 3,750, 5,000 steps)")
    shutil.rmtree(folder)
    print(f"{len(all_wrong)} wrong")
    return bool(all_wrong)

if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    words = [word for word in sys.argv[1:] if not word.isdecimal()]
    every = ("kill", "power", "data", "term", "corrupt", "fuzz", "leak")
    sys.exit(campaign(words or every, *numbers) if {*words} <= {*every, *STAGES} else __doc__)
