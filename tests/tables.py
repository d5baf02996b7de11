"""The paper's tables in miniature, on the toy world (§4, app. B–D).

    python tests/tables.py claims               one table: an hour or more on two cores
    python tests/tables.py all --seeds 3        all tables; claims, questions, recall for 3 seeds

Each table is a function below and contains the paper's figures. Its cells are calls that run
train.py and eval.py. As many commands as there are cores run at the same time, on one thread each.
Finished stages are not trained again. Each table is printed and written to OUT/TABLE.json."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import data
import train as training

CORES = threading.Semaphore(1 if torch.cuda.is_available() else len(os.sched_getaffinity(0)))
FAILED = threading.Event()              # once it is set, no further command starts
ONE, TWO, KINDS, TASKS = "one_hop", "two_hop", ("seen", "unseen"), ("claims", "qa")

def once(work):
    """`work`, but run only once for the same arguments. Other threads wait for the result."""
    results, locks = cache(work), defaultdict(threading.Lock)

    def ask(*args):
        with locks[args]:
            return results(*args)
    return ask

def command(script, *args):
    """Waits for a free core, runs a script of this project on one thread, returns its output."""
    script = ["-c", script] if "\n" in script else [str(ROOT / script)]
    line = [sys.executable, *script, *map(str, args)]
    with CORES:
        if FAILED.is_set():
            raise data.UserError("another command has failed")
        print(*line[1:], file=sys.stderr, flush=True)
        done = subprocess.run(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT,
                              capture_output=True, text=True)
        if done.returncode:
            FAILED.set()
            said = (done.stderr.strip() or "failed").splitlines()
            raise data.UserError(f"{' '.join(line[1:])}: {said[-1]}")
    return done.stdout

# ------------------------------------------------------------------------------------------ runs

# For each run: flags of train.py, and the run whose BATCH-TOME and memory it reuses (--from). The
# baselines' learning rates were chosen on dev files (tests/README.md). TOME-2 uses TOME-1's folder.
RUNS = {
    "no-memory": ("--memory none --lr 6e-3", None),
    "entities-as-experts": ("--memory entities --lr 6e-3", None),
    "tome-1": ("", None),
    "no-coreference": ("--coref-weight 0", None),
    "last-layer": ("--entity-weight 0", None),
    "labelled-fit": ("", None),
    "no-entity-prediction": ("--entity-weight 0", "tome-1"),
    "linking": ("--linking-weight 0.3", "tome-1"),
    "mlm-alone": ("--entity-weight 0", "no-coreference"),
    "from-warm-up": ("--start {out}/no-memory-{seed}/tome-1.pt", "tome-1"),
    "from-scratch": ("--start scratch", "tome-1"),
    "all-entities": ("--corpus {out}/world-{seed}/corpus.jsonl", None)}

# train.py with the coreference loss on the last layer only, as in the paper.
LAST_LAYER = """
import sys, train
forward = train.BatchTOME.forward
def without_H0(*args, **options):
    H0, alone, *others = forward(*args, **options)
    return alone, alone, *others
train.BatchTOME.forward = without_H0
sys.exit(train.main())
"""

# train.py, except that fit_retrieval fits each query to the mean key of its entity.
LABELLED_FIT = """
import sys, tome, train
spans, fit_keys, entities = tome.linked_spans, tome.fit_keys, []
def with_entities(model, batches):
    entities[:] = [e for batch in batches for e in batch.entity.tolist() if e]
    return spans(model, batches)
def mean_keys(*args):
    keys, which = fit_keys(*args), tome.torch.tensor(entities).unique(return_inverse=True)[1]
    mean = keys.new_zeros(int(which.max()) + 1, keys.shape[1]).index_reduce_(
        0, which, keys, "mean", include_self=False)
    return mean[which]
tome.linked_spans, tome.fit_keys = with_entities, mean_keys
sys.exit(train.main())
"""
SCRIPTS = {"last-layer": LAST_LAYER, "labelled-fit": LABELLED_FIT}

def blocks(name):
    return ["--blocks", "2"] if name == "tome-2" else []

@once
def evaluate(folder, *args):
    return json.loads(command("eval.py", "--json", "--out", folder, *args))

def train(folder, *args, script="train.py"):
    """Runs train.py, which skips finished stages. Returns the run folder."""
    command(script, "--quiet", "--out", folder, *args)
    return Path(folder)

@once
def world(out, seed):
    """A folder with the toy world's examples, and its corpus without the second world held out."""
    folder = out / f"world-{seed}"
    lines, examples = data.toy_world(seed)
    seen = {line["title"] for line in lines if line["split"] == "train"}
    lines = [line if line["title"] in seen else line | {"split": "train"} for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in {"corpus": lines, **examples}.items():
        data.write_lines(folder / f"{name}.jsonl", records)
    return folder

@once
def pretrained(out, name, seed):
    """The folder of a run, once its stage tome is finished."""
    world(out, seed)                            # the corpus of all-entities
    if name == "tome-2":
        return train(pretrained(out, "tome-1", seed), "--stage", "tome", *blocks(name))
    flags, base = RUNS[name]
    if name == "from-warm-up":
        pretrained(out, "no-memory", seed)
    start = ["--from", pretrained(out, base, seed)] if base else ["--seed", seed]
    flags = [flag.format(out=out, seed=seed) for flag in flags.split()]
    return train(out / f"{name}-{seed}", "--stage", "tome", *start, *flags,
                 script=SCRIPTS.get(name, "train.py"))

@once
def finetuned(out, name, seed, task, hops):
    """The folder of a run fine-tuned on examples about one fact (`hops` ONE), or on those about one
    and two facts (TWO). TOME-2, the baselines and all runs on two facts take as many steps as
    TOME-2 does by default; other runs take fewer."""
    base, examples = pretrained(out, name, seed), f"{task}.{'both' if hops == TWO else hops}"
    is_long = hops == TWO or name in ("tome-2", "no-memory", "entities-as-experts")
    schedules = training.PRESETS["toy"]["schedule"]
    steps = schedules.get(f"{task}-2" if is_long else task, schedules[task]).steps
    return train(out / f"{name}-{seed}-{task}-{hops}", "--stage", "finetune", "--task", task,
                 "--from", base, *blocks(name), "--steps", steps, "--examples",
                 world(out, seed) / f"{examples}.train.jsonl")

# ---------------------------------------------------------------------------------------- tables
# A table is a list of rows. A row is a label, followed by cells. A cell is a call (function,
# argument, …), a text, or one of the paper's figures. The argument `seeds` is used by the tables
# claims, questions and recall; all other tables use seed 0.

def figure(out, name, seeds, task, hops, kind, key, *flags):
    """A figure of a fine-tuned run, as a list with its value for each seed."""
    cells = [evaluate(finetuned(out, name, seed, task, hops), "--task", task, *blocks(name),
                      *flags)[task][hops] for seed in seeds]
    return [cell[kind][key] for cell in cells if key in cell[kind]]

def masked(out, name, kind):
    """The fraction of masked tokens that a run predicts correctly, seed 0."""
    return [evaluate(pretrained(out, name, 0))["masked_mention"][kind]["memory"]]

def task_table(task, heads, paper, out, seeds):
    columns = ((ONE, "seen", "memory"), (ONE, "unseen", "memory"), (ONE, "seen", "fact_removed"),
               (TWO, "seen", "memory"), (TWO, "unseen", "memory"), (TWO, "seen", "bridge_removed"))
    rows = [["", "one hop: seen", "unseen", "subject removed", "two hops: seen", "unseen",
             "bridge removed", *heads]]
    for name in ("no-memory", "entities-as-experts", "tome-1", "tome-2"):
        rows.append([name, *((figure, out, name, seeds, task, *column) for column in columns),
                     *paper.get(name, [])])
    return rows

def recall(out, seeds):
    rows = [["recall@20, questions", "one hop: seen", "unseen", "two hops: seen", "unseen",
             "paper: EntityQuestions"]]
    for label, name, key, paper in (("BM25", "tome-1", "bm25_recall@20", 71.2),
                                    ("tome-1", "tome-1", "recall@20", 83.3),
                                    ("tome-2", "tome-2", "recall@20", 83.8)):
        rows.append([label, *((figure, out, name, seeds, "qa", hops, kind, key)
                              for hops in (ONE, TWO) for kind in KINDS), paper])
    return rows

def sizes(out, seeds):
    """Figure 2: models fine-tuned with the whole memory and evaluated with a part of it."""
    rows = [["fraction of the memory", "claims: seen", "unseen", "questions: seen", "unseen"]]
    for share in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        rows.append([f"{share:.0%}", *(
            (figure, out, "tome-1", [0], task, ONE, kind, "memory", "--memory-fraction", share)
            for task in TASKS for kind in KINDS)])
    return rows

def unseen(out, seeds):
    """Table 5. The run all-entities has its own corpus, so test examples are passed as files."""
    def accuracy(name, task):
        tests = world(out, 0) / f"{task}.one_hop.unseen.jsonl"
        folder = finetuned(out, name, 0, task, ONE)
        return [evaluate(folder, "--task", task, "--examples", tests)[task]["memory"]]

    return [["entities of the second world", "claims", "questions", "paper: TriviaQA", "CWQ"],
            ["only in the memory of the evaluation", (accuracy, "tome-1", "claims"),
             (accuracy, "tome-1", "qa"), 17.6, 16.7],
            ["in training as well", (accuracy, "all-entities", "claims"),
             (accuracy, "all-entities", "qa"), 17.4, 16.4]]

def ablation(heads, runs, out, seeds):
    rows = [["", "masked mentions: seen", "unseen", "claims: seen", "unseen", "questions: seen",
             "unseen", *heads]]
    for label, name, *paper in runs:
        rows.append([label, *((masked, out, name, kind) for kind in KINDS),
                     *((figure, out, name, [0], task, ONE, kind, "memory")
                       for task in TASKS for kind in KINDS), *paper])
    return rows

def labels(out, seeds):
    """What each use of entity labels is worth. In the paper, MLM alone gives visible mentions an
    attention of .55 at the end of batch-tome, and .41 at the end of tome."""
    def attention(name, key, kind):
        return [evaluate(pretrained(out, name, 0))["same_entity_mass"][kind][key]]

    rows = [["", "masked mentions: seen", "unseen", "attention, masked: seen", "unseen",
             "attention, visible: seen", "unseen", "questions: seen", "unseen"]]
    for label, name in (("MLM alone, label-free fit", "mlm-alone"),
                        ("+ coreference on the last layer", "last-layer"),
                        ("+ coreference on H0", "no-entity-prediction"),
                        ("+ entity prediction: the preset", "tome-1"),
                        ("the preset, labelled fit", "labelled-fit"),
                        ("the preset, linking", "linking")):
        rows.append([label, *((masked, out, name, kind) for kind in KINDS),
                     *((attention, name, key, kind)
                       for key in ("masked", "visible") for kind in KINDS),
                     *((figure, out, name, [0], "qa", ONE, kind, "memory") for kind in KINDS)])
    return rows

def retrieved(out, seeds):
    """Attention to memories of the same entity, and to the facts that decide a claim."""
    def mass(name, stage, key):
        log = (pretrained(out, name, 0) / "log.jsonl").read_text().splitlines()
        return [[r for r in map(json.loads, log) if r["stage"] == stage][-1]["seen"][key]]

    @once
    def states(name, hops):
        loaded = training.open_run(finetuned(out, name, 0, "claims", hops), "claims",
                                   blocks=2 if name == "tome-2" else 1)
        tests = training.toy_file(loaded[0], "claims", hops, "test")
        return deciding(*loaded, training.task_examples(loaded[0], "claims", tests))

    def share(name, hops, *fact):
        return [states(name, hops)[fact]] if fact in states(name, hops) else ""

    rows = [["attention on the same entity", "visible", "masked", "paper", ""]]
    for name, stage, paper in (("no-coreference", "batch-tome", 55), ("mlm-alone", "tome-1", 41),
                               ("tome-1", "batch-tome", ""), ("tome-1", "tome-1", "")):
        masses = [(mass, name, stage, key) for key in ("attention_visible", "attention")]
        rows.append([f"{name}, end of {stage}", *masses, paper])
    rows.append(["best memory states the fact (test claims)", "layer 1: first fact", "second",
                 "layer 2: first fact", "second"])
    for hops in (ONE, TWO):
        for name in ("tome-1", "tome-2"):
            rows.append([f"{name}, {hops}", *((share, name, hops, layer, n)
                                              for layer in (1, 2) for n in (1, 2))])
    return rows

@torch.no_grad()
def deciding(run, tome, memory, examples):
    """{(layer, n): the share of claims for which, in this layer, the best memory of some mention is
    in a passage that states the n-th fact, that is, links its subject and its object}."""
    index, hits = run.corpus.entity_index, defaultdict(list)
    for example in examples:
        batch = training.examples_batch(run, "claims", [example]).to(run.device)
        _, found = tome(batch.tokens, batch.attention_mask, batch, memory)
        chain = [index[example.info[name]] for name in ("subject", "bridge", "object")
                 if name in example.info]
        for layer, layer_found in enumerate(found, 1):
            best = layer_found.ids[:, 0]
            passages = memory.passage[best[best >= 0]].unique().tolist()
            linked = [set(run.corpus.passage_entities(p).tolist()) for p in passages]
            for n, fact in enumerate(zip(chain, chain[1:]), 1):
                hits[layer, n].append(any(entities.issuperset(fact) for entities in linked))
    return {cell: float(np.mean(values)) for cell, values in hits.items()}

# Does attention do more than match strings? Every entity of this toy world has a second name, which
# two passages of its article introduce. A quarter of its mentions elsewhere use this name.

FIRST_WORDS = """Azure Brisk Calm Daring Eager Fierce Gaudy Happy Icy Jolly Keen Lively Merry Nimble
 Odd Proud Quick Rusty Shy Tall Ugly Vain Weary Young Zesty Ample Bold Curly Dusty Early Fancy Giddy
 Hasty Idle Jumpy Kind Loud Misty Noisy Old Plain Rapid Sly Tidy Urban Vivid Wise Dizzy Brave
 Chilly Clever Humble Polite Rowdy Silly Stout Sunny Swift Witty Zippy""".split()
LAST_WORDS = """Ant Badger Crow Duck Elk Ferret Goose Heron Ibis Jackal Koala Lynx Mole Newt Otter
 Panda Quail Raven Seal Toad Urchin Viper Wasp Yak Zebra Adder Bison Camel Donkey Emu Finch Gecko
 Hare Iguana Jay Kiwi Lemur Moose Narwhal Owl Pony Rabbit Skunk Trout Vole Weasel Wren Beetle
 Lizard Mouse Parrot Sheep Shrimp Squid Stork Swan Tapir Turkey Walrus Whale""".split()

def renamed(text, mentions, names_of):
    """The text and its mentions, after mention i has been replaced by names_of(i), a list of one or
    two names (if it is empty, the mention stays as it was). Two names are written like this: "Alma
    Verran, whom friends call Wise Otter,"."""
    new, result, at = "", [], 0
    for i, mention in enumerate(mentions):
        start, end = mention["start"], mention["end"]
        new += text[at:start]
        names = names_of(i) or [text[start:end]]
        for name in names:
            new += ", whom friends call " if name is not names[0] else ""
            result.append(mention | {"start": len(new), "end": len(new) + len(name)})
            new += name
        new += "," if len(names) > 1 else ""
        at = end
    return new + text[at:], result

@once
def second_names(out, seed=0):
    """(a folder with the toy world of second names, {entity: second name}). Half of the training
    questions use the second name. Every test question occurs twice, once with each name."""
    lines, examples = data.toy_world(seed)
    rng, folder = np.random.default_rng(seed), out / f"second-names-{seed}"
    entities = sorted({m["entity"] for line in lines for m in line["mentions"]})
    names = [f"{first} {last}" for first in FIRST_WORDS for last in LAST_WORDS]
    second = dict(zip(entities, rng.permutation(names).tolist()))
    introductions = defaultdict(int)
    for line in sorted(lines, key=lambda line: line["split"] == "held_out"):
        own = [i for i, m in enumerate(line["mentions"]) if m["entity"] == line["title"]]
        introduces = introductions[line["title"]] < 2 and bool(own)
        introductions[line["title"]] += introduces

        def names_of(i):
            mention = line["mentions"][i]
            entity = mention["entity"]
            is_name = line["text"][mention["start"]:mention["end"]] == entity
            if introduces and entity == line["title"]:
                return [entity, second[entity]] if i == own[0] else []
            return [second[entity]] if is_name and rng.random() < .25 else []

        line["text"], line["mentions"] = renamed(line["text"], line["mentions"], names_of)
    folder.mkdir(parents=True, exist_ok=True)
    data.write_lines(folder / "corpus.jsonl", lines)
    for split in ("train", "dev", "test", "unseen"):
        for which, share in {"first": 0, "second": 1, "mixed": .5}.items():
            asked = []
            for line in examples[f"qa.one_hop.{split}"]:
                text, mentions = renamed(line["question"], line["mentions"], lambda i: (
                    [second[line["subject"]]] if rng.random() < share else []))
                asked.append(line | {"question": text, "mentions": mentions})
            data.write_lines(folder / f"{which}.{split}.jsonl", asked)
    return folder, second

@torch.no_grad()
def attention_by_name(folder, second, n=1000):
    """{(kind, name): the mean attention that visible mentions using this name give to memories that
    use the first name of their entity}. For a kind "… alone", memories from passages that contain
    both names (such as those that introduce the second name) are left out. Mentions in passages
    with both names, and mentions without such a memory in another passage, are not counted."""
    run, tome, memory = training.open_run(folder)
    corpus, first = run.corpus, run.corpus.entity_names
    entity, everything, E = corpus.mention_entity, np.arange(len(corpus.mention_entity)), len(first)
    passage = corpus.passage_of(everything)
    pair = passage * E + entity
    shown = [corpus.show_mention(m, 0).rpartition("[")[2].partition("]")[0] for m in everything]
    is_first = np.array([text == first[e] for text, e in zip(shown, entity)])
    is_second = np.array([text == second.get(first[e]) for text, e in zip(shown, entity)])
    introduces = np.isin(passage, np.intersect1d(pair[is_first], pair[is_second]) // E)
    chosen = memory.select(torch.from_numpy(is_first[memory.mention.numpy()]))
    alone = chosen.select(torch.from_numpy(~introduces[chosen.mention.numpy()]))
    rng, result, parts = np.random.default_rng(0), {}, {"": chosen, " alone": alone}
    is_elsewhere = {}
    for label, part in parts.items():
        pairs = np.unique(part.passage.numpy() * E + part.entity.numpy())
        n_passages = np.bincount(pairs % E, minlength=E)[entity]
        is_elsewhere[label] = n_passages > np.isin(pair, pairs)
    for kind in KINDS:
        is_kind = run.entity_group[entity] == kind
        for name, is_name in (("first", is_first), ("second", is_second)):
            asked = np.flatnonzero(is_name & is_kind & ~introduces & corpus.held_out[passage])
            asked = rng.permutation(asked)[:n]
            for label, part in parts.items():
                counted, masses = asked[is_elsewhere[label][asked]], []
                for some in np.array_split(counted, max(1, len(counted) // 64)):
                    batch = data.corpus_batch(corpus, passage[some])
                    _, found = tome(batch.tokens, batch.attention_mask, batch, part)
                    mass = (found[-1].weights * (found[-1].entity == batch.entity[:, None])).sum(1)
                    masses += mass[np.isin(batch.mention, some)].tolist()
                result[kind + label, name] = float(np.mean(masses))
    return result

def names(out, seeds):
    @once
    def folder():
        where, _ = second_names(out)
        return train(out / "second-names", "--stage", "tome", "--corpus", where / "corpus.jsonl")

    @once
    def attention():
        return attention_by_name(folder(), second_names(out)[1])

    @once
    def asked():
        where, _ = second_names(out)
        return train(out / "second-names-qa", "--stage", "finetune", "--task", "qa", "--examples",
                     where / "mixed.train.jsonl", "--from", folder())

    def answers(name, kind):
        tests = second_names(out)[0] / f"{name}.{'test' if kind == 'seen' else kind}.jsonl"
        return [evaluate(asked(), "--task", "qa", "--examples", tests)["qa"]["memory"]]

    rows = [["a mention that uses", "the first name: seen", "unseen", "the second name: seen",
             "unseen"]]
    for label, suffix in (("attention on its entity's first name", ""),
                          ("… without passages with both", " alone")):
        rows.append([label, *((lambda key: [attention()[key]], (kind + suffix, name))
                              for name in ("first", "second") for kind in KINDS)])
    rows.append(["questions", *((answers, name, kind) for name in ("first", "second")
                                for kind in KINDS)])
    return rows

# Appended text is about persons whose names are new pairs of known words, or about changed facts.

def appended(out, seeds):
    """How many questions about teachers are answered correctly after text about them was appended
    to the memory, without any training."""
    lines, _ = data.toy_world(0)
    known = {line["title"] for line in lines}
    rng = np.random.default_rng(5)
    firsts, lasts = (part.split() for part in data.NAMES["person"].split("/"))
    everybody = rng.permutation([f"{a} {b}" for a in firsts for b in lasts]).tolist()
    new = [name for name in everybody if name not in known]
    of_kind = {kind: [line["title"] for line in lines if line["title"] in {
        f"{a} {b}" for a in first.split() for b in last.split()}]
        for kind, (first, last) in ((k, v.split("/")) for k, v in data.NAMES.items())}

    def passages(persons, relations, n=1):
        """n passages about each person, each with a sentence for each relation."""
        for person, teacher in persons.items():
            for i in range(n):
                sentences = []
                for name in relations:
                    relation = data.RELATIONS[name]
                    obj = teacher
                    if name != "teacher":
                        obj = rng.choice(of_kind[relation.object]).item()
                    sentences.append((relation.phrases[i], {"S": (person,) * 2, "O": (obj,) * 2}))
                yield {"title": person, **data.toy_line("text", sentences)}

    def answered(label, persons, records, *flags):
        run = out / f"appended-{label}"
        shutil.copytree(finetuned(out, "tome-1", 0, "qa", ONE), run, dirs_exist_ok=True)
        file, questions = out / f"{label}.jsonl", out / f"{label}.qa.jsonl"
        data.write_lines(file, records)
        data.write_lines(questions, ({"question": f"Who was the teacher of {person}?",
                                      "answers": [teacher]} for person, teacher in persons.items()))
        train(run, "--stage", "memory", "--append", file, *flags)
        figures = evaluate(run, "--task", "qa", "--examples", questions)
        return [figures["qa"]["memory"] * len(persons)]

    persons = dict(zip(new[:40], new[40:80]))
    changed = dict(zip([name for name in everybody if name in known][:20], new[80:100]))
    three = ("teacher", "born_in", "employer")
    return [["teachers answered", "of 40 new persons", "of 20 changed facts"],
            *([f"{n} sentences", (answered, f"{n}-sentences", persons,
                                  passages(persons, three[:n])), ""] for n in (1, 2, 3)),
            ["3 passages of one sentence", (answered, "passages", persons,
                                            passages(persons, three[:1], 3)), ""],
            ["old article kept", "", (answered, "kept", changed, passages(changed, three[:1]))],
            ["old article replaced", "", (answered, "replaced", changed,
                                          passages(changed, three[:1]), "--replace")]]

# ------------------------------------------------------------------------- printing, command line

TABLES = {
    "claims": partial(task_table, "claims", ["paper: FEVER", "HoVer"], {
        "entities-as-experts": [63.6, 66.6], "tome-1": [67.8, 72.8], "tome-2": [68.1, 73.1]}),
    "questions": partial(task_table, "qa", ["paper: EntityQuestions", "CWQ"], {
        "entities-as-experts": [32.5, 42.7], "tome-1": [62.1, 44.9], "tome-2": [66.0, 47.7]}),
    "sizes": sizes, "unseen": unseen, "recall": recall,
    "objectives": partial(ablation, ["paper: FEVER", "TriviaQA"], [
        ("tome-1", "tome-1", 70.5, 50.8),
        ("without coreference loss", "no-coreference", 68.4, 42.5),
        ("without entity prediction", "no-entity-prediction", 70.7, 49.4)]),
    "labels": labels,
    "initialisation": partial(ablation, [], [           # app. B.6
        ("from BATCH-TOME", "tome-1"), ("from scratch", "from-scratch"),
        ("from the warm-up Transformer", "from-warm-up")]),
    "retrieved": retrieved, "appended": appended, "second-names": names}
SEEDED = ("claims", "questions", "recall")

def filled(tables):
    """{name: rows}, in which every call has been replaced by its result. All calls run at once."""
    cells = [cell for rows in tables.values() for row in rows for cell in row]
    calls = [cell for cell in cells if isinstance(cell, tuple)]
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        results = iter(list(pool.map(lambda call: call[0](*call[1:]), calls)))
    return {name: [[next(results) if isinstance(cell, tuple) else cell for cell in row]
                   for row in rows] for name, rows in tables.items()}

def print_table(title, rows):
    print(f"\n{title}")
    for label, *cells in rows:
        print(f"| {label:<42} |", *(f"{as_text(cell):<14} |" for cell in cells), flush=True)

def as_text(cell):
    """A list as mean ± standard deviation (with n - 1, since seeds are a sample), or str(cell)."""
    if not isinstance(cell, list):
        return str(cell)
    spread = f" ± {np.std(cell, ddof=1):.2f}" if len(cell) > 1 else ""
    return f"{np.mean(cell):.2f}{spread}" if cell else "-"

def main(argv=None):
    parser = argparse.ArgumentParser(description="The paper's tables in miniature.")
    parser.add_argument("table", choices=("all", *TABLES))
    parser.add_argument("--seeds", type=int, default=1,
                        help=f"number of seeds for {', '.join(SEEDED)}")
    parser.add_argument("--out", type=lambda path: Path(path).absolute(), default="runs/tables")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(TABLES) if args.table == "all" else [args.table]
    try:
        tables = {}
        for name in names:
            tables[name] = TABLES[name](args.out, range(args.seeds if name in SEEDED else 1))
        for name, rows in filled(tables).items():
            data.write_json(args.out / f"{name}.json", {"lines": rows})
            print_table(name, rows)
        return 0
    except (data.UserError, OSError) as error:
        return data.complain("tables.py", error)
    except KeyboardInterrupt:
        print("tables.py: stopped; run the same command again to continue", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
