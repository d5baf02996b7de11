"""What machines do to a run, done on purpose: kills, damaged files, bad lines, full disks.

    python tests/faults.py                 the whole campaign, with its figures (ten minutes on one core)
    python tests/faults.py kill corrupt    parts of it: kill, processes, corrupt, fuzz, leak, memory

tests/test_faults.py runs a few faults of each kind. A fault is injected into a forked child that runs a user's command
on a very small model; whatever happens to it, the same command is given again, and the folder is compared, file by
file, with that of a run to which nothing happened.
"""
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
import threading
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
import eval as evaluation
import memory
import train

SHARED = Path(os.environ.get("TOME_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
MICRO = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 1, "n_block": 1, "cluster": 8, "log_every": 3,
         "save_every": 2, "eval_mentions": 8, "key_dim": 16, "value_dim": 16, "coref_dim": 16, "vocab": 600, "k": 8,
         "k_shard": 8, "k_answer": 8, "k_answer_shard": 8, "max_positions": 96, "max_length": 96, "dropout": 0.1,
         "schedule": {name: train.Schedule(6, 1e-3, 1, 8) for name in ("batch-tome", "tome", "claims", "qa")}}
SHARD = 16                      # passages a shard
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])     # imports half of PyTorch: once, before we fork


def shrink():
    train.PRESETS["toy"] = MICRO
    memory.PASSAGES_PER_SHARD = SHARD


def write_world(folder, subjects=24):
    """corpus.jsonl and qa.train.jsonl of a few subjects of the toy world."""
    lines, examples = data.toy_world(seed=3)
    seen = {line["title"] for line in lines if line["split"] == "train"}
    keep = {*sorted(seen)[:subjects], *sorted({line["title"] for line in lines} - seen)[:4]}
    rows = [e for e in examples["qa.one_hop.train"] if e["subject"] in keep][:24]
    for name, records in (("corpus", [line for line in lines if line["title"] in keep]), ("qa.train", rows)):
        data.write_lines(folder / f"{name}.jsonl", records)


def command(stage, world, out, *more):
    """The arguments of train.py for a stage; "corpus" is the preparation that batch-tome begins with."""
    name = "batch-tome" if stage == "corpus" else stage
    arguments = ["--stage", name, "--corpus", world / "corpus.jsonl", "--out", out]
    if stage == "finetune":
        arguments += ["--task", "qa", "--examples", world / "qa.train.jsonl"]
    return [str(a) for a in [*arguments, *more]]


# ---- children


class Child:
    """train.main(arguments) in a forked process, after fault() there. What it prints goes to a file."""

    def __init__(self, arguments, fault=lambda: None, environment={}, main=train.main):
        self.said = tempfile.TemporaryFile("w+")
        self.started = time.time()
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
                evaluation.report = lambda *_: None         # it only reads
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
        """(exit code or minus the signal, what was said, seconds)."""
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
        return os.waitstatus_to_exitcode(status), self.said.read(), time.time() - self.started


def run(arguments, fault=lambda: None, **more):
    return Child(arguments, fault, **more).wait()


def die_at_write(n):
    """A fault: killed at the n-th file that is written, half of it on the disk under its temporary name."""
    def fault():
        count, real = itertools.count(1), os.fsync

        def fsync(fd):
            if next(count) == n:
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            real(fd)
        os.fsync = fsync
    return fault


def die_at_rename(n):
    """A fault: killed before the n-th file gets its name."""
    def fault():
        count, real = itertools.count(1), os.replace

        def rename(*names):
            if next(count) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*names)
        os.replace = rename
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
    """{file: what it holds}: bytes; of a checkpoint its values; of the log its lines without the timing."""
    held = {}
    for path in sorted(p for p in Path(out).rglob("*") if p.is_file()):
        name = str(path.relative_to(out))
        if name.endswith(".pt"):
            held[name] = torch.load(path, weights_only=True)
        elif name == "log.jsonl":
            lines = map(json.loads, path.read_text().splitlines())
            held[name] = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
        else:
            held[name] = path.read_bytes()
    return held


def difference(out, expected):
    """The names of files that differ from, are missing in or too many for `expected`."""
    found = contents(out)
    return sorted({n for n in found.keys() ^ expected.keys()} | {n for n in found.keys() & expected.keys()
                                                                 if not equal(found[n], expected[n])})


STAGES = ("corpus", "batch-tome", "memory", "tome", "finetune")


class Reference:
    """A run to which nothing happened: before[stage], a folder as the stage finds it; after[stage], its contents."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        write_world(folder)
        self.before, self.after, self.seconds, self.writes = {}, {}, {}, {}
        out = folder / "run"
        for stage in STAGES:
            if stage == "batch-tome":           # with the corpus, without anything trained
                shutil.rmtree(out)
                out.mkdir()
                shutil.copytree(self.before_run / "corpus", out / "corpus")
                shutil.copy(self.before_run / "run.json", out)
            self.before[stage] = folder / f"before-{stage}"
            if out.exists():
                shutil.copytree(out, self.before[stage])
            else:
                self.before[stage].mkdir()
            counted = folder / "counted"

            def count():
                real = os.replace

                def rename(*names):
                    real(*names)
                    with open(counted, "a") as file:
                        file.write("x")
                os.replace = rename
            code, said, self.seconds[stage] = run(command(stage, folder, out), count)
            assert code == 0, said
            self.writes[stage] = counted.stat().st_size
            counted.unlink()
            self.after[stage] = contents(out)
            if stage == "corpus":
                self.before_run = folder / "first"
                shutil.copytree(out, self.before_run)

    def fresh(self, stage):
        """A folder as the stage finds it, to be spoilt. Its name is always the same: run.json does not hold it."""
        out = self.folder / "spoilt"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.before[stage], out)
        return out


def kills(reference, stage, n, rng):
    """n kills of a stage, each followed by the same command. Returns how many died, and what went wrong."""
    died, wrong = 0, []
    for i in range(n):
        out = reference.fresh(stage)
        arguments = command(stage, reference.folder, out)
        kind = ("time", "write", "rename")[i % 3]
        at = rng.uniform(0, reference.seconds[stage]) if kind == "time" else rng.randint(1, reference.writes[stage])
        fault = {"time": lambda: None, "write": die_at_write(at), "rename": die_at_rename(at)}[kind]
        child = Child(arguments, fault)
        if kind == "time":
            time.sleep(at)
            os.kill(child.pid, signal.SIGKILL)
        code, said, _ = child.wait()
        died += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            wrong.append(f"{stage}, {kind} {at}: ended with {code}: {said[-500:]}")
        code, said, _ = run(arguments)
        if code or (differs := difference(out, reference.after[stage])):
            wrong.append(f"{stage}, {kind} {at}: {said[-500:] if code else f'{differs} differ'}")
    return died, wrong



# ---- several processes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def several(arguments, faults):
    """Children that are the processes of one run, each with its fault."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(len(faults))}
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
    "run.json": ("run.json", "done", "eval"), "corpus arrays": ("corpus/*.bin", "done", "eval"),
    "corpus meta": ("corpus/meta.json", "done", "eval"), "corpus names": ("corpus/[te]*s.json", "done", "eval"),
    "tokenizer": ("corpus/tokenizer.json", "done", "eval"), "tome.pt": ("tome.pt", "done", "eval"),
    "qa.pt": ("qa.pt", "done", "eval qa"), "manifest": ("memory/manifest.json", "done", "eval"),
    "memory arrays": ("memory/*.npy", "done", "eval"), "batch-tome.pt": ("batch-tome.pt", "memory", "memory"),
    "shard records": ("memory/shard-*.json", "half a memory", "memory"),
    "tome.pt, half trained": ("tome.pt", "half a tome", "tome"), "log.jsonl": ("log.jsonl", "half a tome", "tome")}


def halves(reference):
    """The folders in which KINDS are spoilt: a whole run, and stages cut off in the middle."""
    folders = {"memory": reference.before["memory"], "done": reference.folder / "run"}
    for name, stage, fault in (("half a memory", "memory", die_at_write(30)),
                               ("half a tome", "tome", die_at_step(6))):
        out = reference.fresh(stage)
        run(command(stage, reference.folder, out), fault)
        folders[name] = reference.folder / name
        shutil.copytree(out, folders[name])
    return folders


def command_of(kind, world, out):
    """A function that runs the command which reads this kind of file: (exit code, result, stderr)."""
    how = KINDS[kind][2]
    if how.startswith("eval"):
        more = ["--task", "qa", "--examples", world / "qa.train.jsonl"] if how == "eval qa" else []
        return quietly(evaluation.main, ["--out", out, "--json", *more])
    code, _, err = quietly(train.main, command(how, world, out))
    return code, contents(out) if code == 0 else None, err


def corruptions(reference, folders, kind, n, rng):
    """n random corruptions of a kind of file: how many were found, how many had no effect, what went wrong."""
    pattern, where, _ = KINDS[kind]
    out, world = reference.folder / "spoilt", reference.folder

    def fresh():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folders[where], out)

    fresh()
    code, expected, err = command_of(kind, world, out)
    assert code == 0, err
    found, harmless, wrong = 0, 0, []
    for _ in range(n):
        fresh()
        path = rng.choice(sorted(out.glob(pattern)))
        how, name = spoil(path, rng), str(path.relative_to(out))
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        try:
            code, result, err = command_of(kind, world, out)
        except BaseException:
            wrong.append(f"{name}, {how}: {traceback.format_exc()[-600:]}")
            continue
        if code == 0:
            if isinstance(result, dict) and name in ("log.jsonl",):     # a record, read by nobody
                result, same = ({**r, name: None} for r in (result, expected))
            else:
                same = expected
            harmless += (fine := equal(result, same))
            if not fine:
                wrong.append(f"{name}, {how}: another result, and nothing was said")
            continue
        found += 1
        named = path.name in err or where == "done" and name.startswith("corpus") and "corpus" in err
        if code != 1 or err.strip().count("\n") or not named:
            wrong.append(f"{name}, {how}: {code}, {err}")
        if before != {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}:
            wrong.append(f"{name}, {how}: something was overwritten")
    return found, harmless, wrong


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
        return bytes(raw)
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
    try:
        corpus = data.Corpus.build(path, folder / "corpus", tokenizer, 32, 48)
    except data.UserError as error:
        assert "holds no" in str(error) and not any(m.entity for text in kept for m in text.mentions) or not kept
        return len(kept), len(errors), empty
    counts = corpus.meta["counts"]
    assert counts["texts"] == len(kept)
    assert counts["mentions_read"] == sum(len(t.mentions) for t in kept)
    assert counts["mentions_read"] == counts["mentions"] + sum(corpus.meta["dropped"].values())
    data.make_batch(corpus, range(len(corpus.article)), np.random.default_rng(0), .2, .1, 4)
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
    lines, examples = data.toy_world(seed=3)
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


def leak(reference, steps=5000):
    """Own memory in MB after a fifth of the steps of a training run, after half and at its end."""
    out, seen, count = reference.fresh("batch-tome"), [], itertools.count(1)
    real = torch.optim.AdamW.step

    def step(*args, **kwargs):
        n = next(count)
        if n in (steps // 5, steps // 2, steps):
            seen.append(round(resident(), 1))
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


def peak_memory(source, folder, steps=3):
    """{stage: peak of own memory in MB} on a corpus file, and its counts. Texts are cut at 100 characters, to have
    less to compute."""
    folder.mkdir()
    corpus = folder / "corpus.jsonl"
    data.write_lines(corpus, ({"title": t.title, "text": t.text[:100],
                               "mentions": [m._asdict() for m in t.mentions if m.end <= 100]}
                              for t in data.read_corpus(source)))
    result = {}
    for stage in ("corpus", "batch-tome", "memory", "tome"):
        peak = folder / "peak"

        def watch():
            schedule = {name: train.Schedule(steps, 1e-3, 1, 32) for name in MICRO["schedule"]}
            train.PRESETS["toy"] = {**MICRO, "schedule": schedule, "vocab": 2000, "cluster": 32}
            memory.PASSAGES_PER_SHARD = 2048
            highest = [0.0]

            def look():
                while True:
                    if (now := resident()) > highest[0]:
                        highest[0] = now
                        peak.write_text(str(now))
                    time.sleep(0.01)
            threading.Thread(target=look, daemon=True).start()
            if stage == "corpus":
                def stop(*_):
                    raise train.UserError("the corpus is ready")
                train.stage_batch_tome = stop
        code, said, seconds = Child(["--stage", "batch-tome" if stage == "corpus" else stage, "--corpus", str(corpus),
                                     "--out", str(folder / "run")], watch).wait(1200)
        assert code == 0 or stage == "corpus", said
        result[stage] = round(float(peak.read_text()))
        print(f"    {source.name}, {stage}: {result[stage]} MB, {seconds:.0f} s", flush=True)
    return result, data.Corpus.open(folder / "run" / "corpus").meta["counts"]


# ---- the campaign


def campaign(parts, n_kills=20, n_corruptions=100, n_lines=2400):
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    rng, wrong, started = random.Random(0), [], time.time()

    def title(text):
        print(f"{time.time() - started:5.0f} s  {text}", flush=True)

    reference = Reference(folder / "reference")
    shrink()
    evaluation.report = lambda *_: None
    if "kill" in parts:
        title(f"SIGKILL, {n_kills} times a stage: at random moments, in the middle of a write, before a rename")
        for stage in STAGES:
            died, bad = kills(reference, stage, n_kills, rng)
            wrong += bad
            title(f"  {stage}: {died} died, {n_kills - len(bad)} of {n_kills} ended as if nothing had happened")
    if "corrupt" in parts:
        title(f"damaged files, {n_corruptions} of each kind: bits flipped, cut off, overwritten with zeros, missing")
        folders = halves(reference)
        for kind in KINDS:
            found, harmless, bad = corruptions(reference, folders, kind, n_corruptions, rng)
            wrong += bad
            title(f"  {kind}: {found} found, {harmless} without effect, {len(bad)} wrong")
    if "fuzz" in parts:
        counts = fuzz(folder, n_lines)
        title(f"{sum(sum(c.values()) for c in counts.values())} mutated lines")
        for what, c in counts.items():
            title(f"  {what}: " + ", ".join(f"{n} {how}" for how, n in c.items()))
    if "leak" in parts:
        title("5,000 steps: own memory after 1,000, 2,500 and 5,000 of them")
        title(f"  {leak(reference)} MB")
    if "memory" in parts:
        title("peak of own memory by stage, on 600 and on 4,598 articles")
        for name in ("mini600", "wikispeedia"):
            if (SHARED / f"{name}_linked.jsonl.gz").exists():
                result, counts = peak_memory(SHARED / f"{name}_linked.jsonl.gz", folder / name)
                title(f"  {name}: {counts['passages']} passages, {counts['linked']} linked mentions: {result} MB")
    shutil.rmtree(folder)
    print("\n".join(wrong) or "nothing lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(campaign(sys.argv[1:] or ("kill", "corrupt", "fuzz", "leak", "memory")))
