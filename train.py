"""The four stages of training (paper §2.3, §2.4, app. A, app. B.1), one loop for all of them:

    batch-tome   Mention Encoder and BATCH-TOME together, over the memory of the batch      MLM + coreference
    memory       the Mention Encoder reads the whole corpus                                 -> runs/…/memory
    tome         TOME, started from BATCH-TOME, over that frozen memory                     MLM + entity prediction
    finetune     TOME on claims or on questions whose answer is an entity

    python train.py --stage tome                                    everything, on the toy world
    python train.py --stage tome --corpus my.jsonl.gz --preset mini --out runs/mine
    torchrun --nproc_per_node 2 train.py --stage tome               the same work, shared by two processes

A stage runs the ones before it that have left no result yet, and goes on where it stopped. Every batch, mask and
dropout of a step follows from (seed, stage, step) alone: a run that was cut off and taken up again is the same run.
"""
import argparse
import json
import os
import signal
import sys
import time
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path

try:
    import fcntl
except ImportError:         # Windows
    fcntl = None

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import ann
import data
from data import UserError, checksum, read_json, write_file, write_json
from encoder import CheckpointError, Config, bert_config, load_bert
from memory import MentionMemory, build_memory, encode_passages, load_memory, read_manifest
from tome import (TOME, BatchTOME, answer_loss, answer_query, answer_question, claim_logits, coreference_loss, entity_prediction_loss, fit_retrieval, start_positions, mlm_loss,
                  predict_entity, share_of_mean, split_into_blocks, whole_memory_loss)

STAGES = ("batch-tome", "memory", "tome", "finetune")
FORMAT = 3


@dataclass
class Schedule:
    steps: int
    lr: float
    warmup: int                     # steps of linear warm-up; then linear decay to zero
    batch: int                      # passages (or examples) a step, over all processes


@dataclass
class Settings:
    """Everything about a run that is not a dimension of the model. The defaults are the paper's (app. A, B.1), as far as it
    has them."""
    passage_length: int = 128       # T, excluding entity markers
    max_length: int = 512           # … and with them
    vocab: int = 30522              # WordPiece, where it is trained on the corpus
    cluster: int = 256              # related passages that are batched together (app. A.1)
    mentions: int = 24              # a passage on average; 32 when fine-tuning
    mention_rate: float = 0.2       # masked mentions
    token_rate: float = 0.1         # masked other tokens
    coref_weight: float = 0.15      # of the coreference loss in batch-tome; the rest is MLM's
    entity_weight: float = 0.15     # of entity prediction in tome, likewise
    coref_entities: int = 1_000_000     # coreference only over the most frequent ones
    memory_fraction: float = 38 / 150   # of the memory, while pre-training TOME (§4.1)
    memory_dtype: str = "float16"
    beta2: float = 0.999
    weight_decay: float = 0.01
    clip: float = 1.0
    frequency_bias: bool = True     # a fresh MLM head starts at the words' frequencies: to learn them alone costs
                                    # Adam a thousand steps on real text; on the toy world it gains nothing
    span_rate: float = 1.0          # the rate of the layers that retrieve, as a multiple (see PRESETS["toy"]) …
    tied: float = 0.0               # … for this share of batch-tome's steps with the memory, its first ones
    bert_rate: float = 1.0          # learning rate from a pretrained BERT (--init), as a multiple of the schedule's
    memory_from: float = 0.0        # share of batch-tome's steps in which that BERT, by MLM and coreference alone, first
                                    # learns what its new markers stand around; then retrieval is fitted to it
    whole_softmax: bool = False     # fine-tuning on questions: eq. 10 over the whole memory, not its k_answer best. An
                                    # answer far from them, as that of two hops is at first, gets no gradient otherwise
    cloze_weight: float = 0.3       # of each of the two losses of clozes beside claims (--cloze), which have 1. With 1 too,
                                    # clozes, whose losses begin at 10, can drown what the claims have learnt before
    claim_mask: bool = False        # claims end in a [MASK] mention as questions do, and may retrieve there
    log_every: int = 1000
    save_every: int = 1000
    eval_mentions: int = 1000       # of each kind, seen and unseen
    schedule: dict = field(default_factory=lambda: {
        "batch-tome": Schedule(1_000_000, 1e-4, 50_000, 4096), "tome": Schedule(500_000, 1e-4, 25_000, 4096),
        "claims": Schedule(20_000, 1e-5, 1000, 32), "qa": Schedule(20_000, 1e-5, 1000, 32)})


# What differs from the paper's numbers. toy: minutes on two cores. mini: a few hundred real articles.
PRESETS = {
    "base": {},
    "mini": dict(hidden=128, n_heads=8, intermediate=512, n_initial=3, n_block=1, max_positions=256, key_dim=64,
                 value_dim=128, coref_dim=64, dropout=0.0, k=64, k_shard=64, k_answer=64, k_answer_shard=64,
                 passage_length=96, max_length=256, vocab=8000, cluster=64, memory_fraction=1.0,
                 memory_dtype="float32", beta2=0.98, span_rate=0.1, tied=1.0, bert_rate=0.1, memory_from=0.75,
                 log_every=100, save_every=100, eval_mentions=300,
                 schedule={"batch-tome": Schedule(800, 2e-3, 80, 64), "tome": Schedule(300, 1e-3, 30, 64),
                           "claims": Schedule(600, 2e-4, 60, 32), "qa": Schedule(600, 2e-4, 60, 32)}),
    "toy": dict(hidden=96, n_heads=6, intermediate=192, n_initial=3, n_block=4, n_block_batch=1, max_positions=128,
                key_dim=64, value_dim=128, coref_dim=64, dropout=0.0, k=64, k_shard=64, k_answer=64, k_answer_shard=64,
                passage_length=64, max_length=128, vocab=2000, cluster=64, mention_rate=0.25, memory_fraction=1.0,
                memory_dtype="float32", beta2=0.98, init_std=0.05, memory_from=0.3, span_rate=0.1, tied=0.5, frequency_bias=False, whole_softmax=True,
                claim_mask=True, log_every=200, save_every=200, eval_mentions=200,
                schedule={"batch-tome": Schedule(2500, 1.5e-3, 100, 64), "tome": Schedule(800, 2e-3, 50, 64),
                          "claims": Schedule(1200, 5e-4, 50, 64), "qa": Schedule(400, 1e-3, 50, 64)}),
}


def preset(name, n_blocks=1, changes=None):
    """(Settings, Config) of that name, with --set's changes."""
    values = PRESETS[name] | (changes or {})
    settings = replace(Settings(), **{k: v for k, v in values.items() if k in {f.name for f in fields(Settings)}})
    config = replace(Config(), **{k: v for k, v in values.items() if k in {f.name for f in fields(Config)}})
    for wrong, what in ((config.hidden % config.n_heads, "hidden is no multiple of n_heads"),
                        (not 0 <= config.dropout < 1, "dropout is a share, less than 1"),
                        (config.gelu not in ("none", "tanh"), "gelu is none or tanh"),
                        (settings.memory_dtype not in ("float16", "float32"), "memory_dtype is float16 or float32"),
                        (min(settings.log_every, settings.save_every, config.n_initial, config.n_block) < 1,
                         "log_every, save_every, n_initial and n_block are at least 1")):
        if wrong:
            raise UserError(f"--set: {what}")
    return settings, replace(config, n_blocks=n_blocks)


# ---------------------------------------------------------------------------------------------------------------------
# A run: a folder with the corpus, the tokenizer, checkpoints, the memory and the log


@dataclass
class Run:
    out: Path
    preset: str
    seed: int
    settings: Settings
    config: Config
    corpus: data.Corpus
    tokenizer: object
    device: torch.device
    init: str = None            # folder of the BERT that batch-tome starts from
    n_search: int = None        # buckets that a search of the memory looks into; None: it is exact

    def log(self, record):
        if ann.rank_and_size()[0] == 0:
            path = self.out / "log.jsonl"
            before = path.read_bytes() if path.exists() else b""
            write_file(path, lambda file: file.write(before + json.dumps(record).encode() + b"\n"))

    def first_with_memory(self, schedule):
        """The step of batch-tome from which on the memory is attended."""
        return int(schedule.steps * self.settings.memory_from)

    @property
    def batch_tome_config(self):
        """BATCH-TOME has one memory layer, also where TOME will have two, and perhaps fewer layers (tome.split_into_blocks)."""
        return replace(self.config, n_blocks=1, n_block=self.config.n_block_batch or self.config.n_block)

    def belongs(self, stage):
        """What every checkpoint of this run says of it, to be told from another run's."""
        return {"preset": self.preset, "blocks": 1 if stage == "batch-tome" else self.config.n_blocks, "seed": self.seed,
                "corpus": zlib.crc32(json.dumps(self.corpus.trained_on).encode())}       # … and tokenizer


def say(text, file=None):
    if ann.rank_and_size()[0] == 0:
        tqdm.write(text, file)


def choose_device(name=None):
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch sees no CUDA device; leave --device out")
    if (name or "cuda") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def read_run_file(out):
    """out/run.json: what the run was started with."""
    path = Path(out) / "run.json"
    try:
        run = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing: nothing has been trained there; run python train.py --out {out} first") \
            from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); choose another --out") from None
    if run.get("format") != FORMAT:
        raise UserError(f"{path}: format {run.get('format')}, this version reads {FORMAT}; choose another --out")
    return run


def make_run(args):
    """Create the run folder with tokenised corpus and run.json, or check that this command belongs to the old one."""
    if args.n_search and args.search != "bucketed":
        raise UserError("--n-search goes with --search bucketed")
    out = Path(args.out)
    old = read_run_file(out) if (out / "run.json").exists() else None
    wanted = {"preset": args.preset, "seed": args.seed, "blocks": args.blocks, "set": args.set,
              "corpus": args.corpus and os.path.abspath(args.corpus), "init": args.init and os.path.abspath(args.init)}
    if old is not None:
        for name, value in wanted.items():
            if value is not None and value != old[name]:
                raise UserError(f"{out} was started with --{name} {old[name]}, not {value}; choose another --out")
    else:
        for name in ("batch-tome.pt", "memory", "tome.pt", "claims.pt", "qa.pt"):
            if (out / name).exists():
                raise UserError(f"{out} holds {name} but no run.json, which says what it was started with; put it back "
                               "or choose another --out")
        defaults = {"preset": "toy", "seed": 0, "blocks": 1, "set": {}, "corpus": None, "init": None}
        old = {name: defaults[name] if value is None else value for name, value in wanted.items()}
        old["format"] = FORMAT
    settings, config = preset(old["preset"], old["blocks"], old["set"])
    if old["init"]:         # its dimensions stay in run.json: the run needs the folder only to start
        if "bert" not in old:
            old["bert"] = asdict(bert_config(old["init"], config))
            for name, value in old["set"].items():
                if old["bert"].get(name, value) != value:
                    raise UserError(f"--set {name}: it is {old['bert'][name]} in the BERT of --init {old['init']}; leave it out")
        config = Config(**old["bert"])
    if ann.rank_and_size()[0] == 0:
        prepare_corpus(out, old, settings)
    ann.barrier()
    corpus, tokenizer = data.Corpus.open(out / "corpus"), data.load_tokenizer(out / "corpus" / "tokenizer.json")
    config = replace(config, vocab_size=max(corpus.vocab_size, config.vocab_size if old["init"] else 0),
                     n_entities=0 if config.memory == "mentions" else len(corpus.entity_names))
    return Run(out, old["preset"], old["seed"], settings, config, corpus, tokenizer, choose_device(args.device),
               old["init"], (args.n_search or 32) if args.search == "bucketed" else None)


@contextmanager
def alone_in(out):
    """Keeps every other train.py out of a run folder: two would overwrite each other's checkpoints. A job's first process
    holds the lock; the system takes it back however that ends. Where there are no such locks nothing is checked."""
    if fcntl is None or ann.rank_and_size()[0] > 0:
        yield
        return
    new = not os.path.exists(out)
    try:
        os.makedirs(out, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another train.py is at work there; wait for its end, or choose another folder") \
                from None
        except OSError:         # a file system without locks
            pass
        yield
    finally:
        if new:
            with suppress(OSError):     # it is not empty
                os.rmdir(out)
        os.close(folder)


def prepare_corpus(out, run, settings):
    """Toy world if there is no corpus; tokenizer; flat arrays; run.json. Done once, by the first process."""
    source = run["corpus"]
    if source is None:
        source = out / "world" / "corpus.jsonl"
        if not source.exists():
            say(f"No --corpus: making the toy world in {out / 'world'}.")
            data.write_toy(out / "world", *data.toy_world(run["seed"]))
    started, tokenised = (out / "run.json").exists(), (out / "corpus").exists()
    if not os.path.exists(source) and not (started and tokenised):
        raise UserError(f"{source}: no such file; --corpus wants a file of JSON lines")
    known = run.setdefault("crc32", {})
    for path in sorted((out / "world").glob("*.jsonl")) if run["corpus"] is None else [Path(source)]:
        if path.exists() and known.setdefault(path.name, crc := checksum(path)) != crc:
            raise UserError(f"{path} has changed since this run was started; choose another --out")
    if not (started and tokenised):         # what lies there without a run.json may be of another corpus
        say(f"Tokenising {source}.")
        if run["init"]:
            tokenizer = data.load_tokenizer(Path(run["init"]) / "vocab.txt")
        else:
            tokenizer = data.train_tokenizer((text.text for text in data.read_corpus(source)), settings.vocab)
        corpus = data.Corpus.build(source, out / "corpus", tokenizer, settings.passage_length, settings.max_length)
        counts = corpus.meta["counts"]
        say(f"  {counts['passages']:,} passages, {counts['tokens']:,} tokens, {counts['mentions']:,} mentions "
            f"({counts['linked']:,} linked) of {counts['entities']:,} entities; "
            f"dropped: {corpus.meta['dropped'] or 'none'}")
    if not started:
        write_json(out / "run.json", run)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: tensors and plain values only


def save_checkpoint(path, **values):
    write_file(path, lambda file: torch.save({"format": FORMAT, **values}, file))


def read_checkpoint(path):
    """The checkpoint's dictionary. Never unpickles objects."""
    try:
        with zipfile.ZipFile(path) as file:
            if (name := file.testzip()) is not None:        # torch.load does not compare the checksums in its file
                raise ValueError(f"the checksum of {name} differs")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint["model"], dict):
            raise ValueError("it holds no model")
        return checkpoint
    except OSError:
        raise
    except Exception as error:
        raise UserError(f"{path} is damaged ({(str(error) or type(error).__name__).splitlines()[0][:100]}); "
                       "delete it to train this stage again") from None


def load_checkpoint(path, stage, run):
    """The dictionary of a checkpoint of this run and stage, or None where there is no file."""
    if not path.exists():
        return None
    checkpoint = read_checkpoint(path)
    for name, value in {"format": FORMAT, "stage": stage, **run.belongs(stage)}.items():
        if checkpoint.get(name) != value:
            raise UserError(f"{path} is a checkpoint of another {name} ({checkpoint.get(name)}, here it is {value}); move "
                           "it away to train this stage again")
    return checkpoint


def load_weights(model, state, path):
    """load_state_dict with one sentence where the shapes are another model's."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
        raise UserError(f"{path} does not fit this model ({reason}); choose another --out") from None


def new_batch_tome(run, seed=None):
    """BATCH-TOME with fresh weights (seed: others than this run's), or a BERT's where run.init names its folder."""
    torch.manual_seed(run.seed if seed is None else seed)
    init = run.init
    model = BatchTOME(TOME(run.batch_tome_config))
    if init:
        _, embeddings, layers, mlm = load_bert(init, run.config)
        tome = model.tome
        targets = [*tome.initial.layers, *(layer for block in tome.blocks for layer in block.transformer.layers)]
        tome.embeddings.load_state_dict(embeddings)
        # [E_start] and [E_end] took unused entries. BERT knows a sign that stands around a name and attends to it.
        quote, special = run.tokenizer.token_to_id('"'), run.corpus.special
        if quote is not None:
            word = tome.embeddings.word.weight.data
            word[[special["[E_start]"], special["[E_end]"]]] = word[quote].clone()
        for layer, state in zip(targets, layers, strict=True):
            layer.load_state_dict(state)
        if mlm is None:
            say(f"{init} has no MLM head: made a fresh one.")
        else:
            tome.mlm.load_state_dict(mlm)
    if run.settings.frequency_bias and (not init or mlm is None):
        tokens = run.corpus.tokens[:10 ** 7]
        counts = np.bincount(tokens[run.corpus.maskable[tokens]], minlength=run.config.vocab_size) + 1
        model.tome.mlm.bias.data = torch.from_numpy(np.log(counts / counts.sum())).float()
    if not init:
        start_positions(model)
    return model


def load_batch_tome(run):
    """The finished BATCH-TOME of this run."""
    path = run.out / "batch-tome.pt"
    checkpoint = load_checkpoint(path, "batch-tome", run)
    if checkpoint is None:
        raise UserError(f"{path} is missing; run python train.py --stage batch-tome --out {run.out}")
    model = BatchTOME(TOME(run.batch_tome_config))
    load_weights(model, checkpoint["model"], path)
    return model.to(run.device)


def load_tome(run, stage="tome"):
    """A trained TOME of this run, as saved by stage tome, claims or qa: (model, fingerprint of its encoder)."""
    path = run.out / f"{stage}.pt"
    checkpoint = load_checkpoint(path, stage, run)
    if checkpoint is None or checkpoint["step"] < checkpoint["steps"]:
        how = "tome" if stage == "tome" else f"finetune --task {stage}"
        raise UserError(f"{path} is missing or unfinished; run python train.py --stage {how} --out {run.out}")
    model = TOME(run.config)
    load_weights(model, checkpoint.get("best", checkpoint["model"]), path)
    return model.to(run.device).eval(), checkpoint["encoder"]


# ---------------------------------------------------------------------------------------------------------------------
# What is measured while training: can the memory fill in what only the memory can know?


@torch.no_grad()
def masked_mentions(tome, corpus, memory, mentions, device, batch_size=64):
    """Accuracy on held-out mentions that stand nowhere else in their passage, each masked alone.

    mentions: corpus mention numbers (data.eval_mentions). Returns {"seen" | "unseen": {"accuracy": masked tokens
    right, "mass_masked", "mass_visible": attention of the last memory layer on memories of the mention's own entity,
    "entity": eq. 10's answer right, "n": mentions}}; seen: the entity is linked somewhere in the training passages."""
    tome.eval()
    rank, size = ann.rank_and_size()
    seen_entity = torch.from_numpy(np.asarray(corpus.entity_count) > 0).to(device)
    supported = torch.ones_like(seen_entity)                            # it stands in another passage than the mention's
    if isinstance(memory, MentionMemory):
        supported = memory.passages_of(len(corpus.entity_names)) > 1
    names = ("tokens", "right", "masked", "mass_masked", "visible", "mass_visible", "entity")
    sums = {kind: dict.fromkeys(names, 0.0) for kind in ("seen", "unseen")}
    for first in range(0, len(mentions), batch_size):
        chosen = mentions[first:first + batch_size]
        if len(chosen) < size:              # every process needs a row; the last few are left out
            break
        batch = data.eval_batch(corpus, chosen).part(rank, size).to(device)
        H, found = tome(batch.tokens, batch.attention_mask, batch, memory)
        right = tome.mlm_logits(H, batch.target_index).argmax(-1) == batch.target                # (L,)
        mass = torch.zeros(len(batch.entity), device=device)                                     # (M,)
        if (last := found[-1]) is not None:
            mass = (last.weights * (last.entity == batch.entity[:, None])).sum(-1)
        answer = memory.retrieve(tome.answer(H, batch.row, batch.start, batch.end), batch.passage,
                                 tome.config.k_answer, tome.config.k_answer_shard)
        entity_right = predict_entity(answer.scores, answer.entity).entity == batch.entity       # (M,)
        visible = (batch.entity > 0) & ~batch.masked & supported[batch.entity]
        for kind, is_seen in (("seen", True), ("unseen", False)):
            of_kind = (seen_entity[batch.entity] == is_seen) & (batch.entity > 0)                # (M,)
            here = of_kind[batch.target_mention]                                                 # (L,)
            s = sums[kind]
            s["tokens"] += here.sum().item()
            s["right"] += (right & here).sum().item()
            s["masked"] += (of_kind & batch.masked).sum().item()
            s["mass_masked"] += mass[of_kind & batch.masked].sum().item()
            s["entity"] += (entity_right & of_kind & batch.masked).sum().item()
            s["visible"] += (of_kind & visible).sum().item()
            s["mass_visible"] += mass[of_kind & visible].sum().item()
    result = {}
    for kind, s in sums.items():
        s = {name: float(ann.sum_over_processes(value, device)) for name, value in s.items()}
        result[kind] = {"accuracy": s["right"] / max(s["tokens"], 1), "entity": s["entity"] / max(s["masked"], 1),
                        "mass_masked": s["mass_masked"] / max(s["masked"], 1),
                        "mass_visible": s["mass_visible"] / max(s["visible"], 1), "n": int(s["masked"])}
    return result


def sample_eval_mentions(run, n):
    """n mentions of entities seen in training and n of entities never seen (data.eval_mentions), the same each time."""
    mentions = np.random.default_rng(0).permutation(data.eval_mentions(run.corpus))
    seen = run.corpus.entity_count[run.corpus.mention_entity[mentions]] > 0
    return np.concatenate([mentions[seen][:n], mentions[~seen][:n]])


def supporting_passages(corpus, mentions, each=4, others=512):
    """Passages that make a small memory for these mentions while the Mention Encoder still changes: the articles they
    stand in, a few passages that share the entity, and some others."""
    rng = np.random.default_rng(0)
    articles = np.unique(corpus.article[corpus.passage_of(mentions)])
    own = np.flatnonzero(np.isin(corpus.article, articles))
    candidates = rng.permutation(np.flatnonzero(np.isin(corpus.mention_entity, corpus.mention_entity[mentions])))
    candidates = candidates[np.argsort(corpus.mention_entity[candidates], kind="stable")]
    entity = corpus.mention_entity[candidates]
    place = np.arange(len(entity)) - np.searchsorted(entity, entity)
    return np.unique(np.concatenate([own, corpus.passage_of(candidates[place < each]),
                                     rng.integers(0, len(corpus.article), others)]))


# ---------------------------------------------------------------------------------------------------------------------
# The loop


class Stop(BaseException):
    """SIGINT or SIGTERM: save, say how to go on, leave. No Exception: what catches those must not catch it."""


def leave(number, frame):
    """The signal handler outside of train_stage, where every file is whole or not there."""
    raise Stop("Stopped; the same command goes on from there.")


def optimizer_for(model, schedule, settings):
    """AdamW; no weight decay on layer norms and biases (app. A). The layers that retrieve are groups of their own."""
    groups = [{"params": [], "weight_decay": decay, "retrieves": retrieves}
              for decay in (settings.weight_decay, 0.0) for retrieves in (False, True)]
    for name, p in model.named_parameters():
        retrieves = any(part in name for part in ("query", "key", "coref"))
        groups[2 * (p.dim() < 2) + retrieves]["params"].append(p)
    return torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, settings.beta2), fused=True)


def train_stage(run, stage, model, schedule, next_batch, losses, evaluate, extra):
    """Train `model` for schedule.steps steps and leave run.out/<stage>.pt.

    next_batch(step) -> the whole batch of all processes;
    losses(model, batch) -> {name: (weight, this process's share of the loss)};
    evaluate(model) -> a dictionary for the log, with "score" where the best checkpoint is to be kept;
    extra: plain values for the checkpoint."""
    settings, device, path = run.settings, run.device, run.out / f"{stage}.pt"
    rank, size = ann.rank_and_size()
    model.to(device).train()
    optimizer = optimizer_for(model, schedule, settings)
    step, best, sums = 0, None, {}                  # sums: of what is logged next
    first = run.first_with_memory(schedule)
    checkpoint = load_checkpoint(path, stage, run)
    if checkpoint is not None:
        for name in ("steps", "batch", "lr"):
            if checkpoint[name] != getattr(schedule, name):
                raise UserError(f"{path} was trained with --{name} {checkpoint[name]}, not {getattr(schedule, name)}; "
                               f"leave --{name} out, or choose another --out")
        for name, value in extra.items():
            if checkpoint[name] != value:
                raise UserError(f"{path} was trained with another {name}; move it away to train this stage again")
        step, best, sums = checkpoint["step"], checkpoint.get("best_score"), checkpoint["sums"]
        if step < schedule.steps:
            load_weights(model, checkpoint["model"], path)
            optimizer.load_state_dict(checkpoint["optimizer"])
            say(f"{stage}: going on at step {step}.")
            if checkpoint["processes"] != size:
                say(f"  ({size} processes instead of {checkpoint['processes']}: equal up to rounding)")
    if step >= schedule.steps:
        say(f"{stage}: already trained ({path}).")
        return
    best_weights = checkpoint.get("best") if checkpoint else None
    if rank == 0:
        trim_log(run.out / "log.jsonl", stage, step)

    def save():
        if rank == 0:
            values = {} if best is None else {"best": best_weights, "best_score": best}
            save_checkpoint(path, stage=stage, step=step, steps=schedule.steps, batch=schedule.batch, lr=schedule.lr,
                            processes=size, sums=sums, model=model.state_dict(), optimizer=optimizer.state_dict(),
                            **values, **extra, **run.belongs(stage))

    progress = tqdm(total=schedule.steps, initial=step, desc=stage, disable=rank > 0, mininterval=1.0)
    n_tokens, since = 0, time.time()
    interrupted = []
    handlers = {number: signal.signal(number, lambda number, _: interrupted.append(number))
                for number in (signal.SIGINT, signal.SIGTERM)}
    while step < schedule.steps:
        lr = schedule.lr * min((step + 1) / max(schedule.warmup, 1),
                               (schedule.steps - step) / max(schedule.steps - schedule.warmup, 1))
        tied = stage == "batch-tome" and 0 <= step - first < (schedule.steps - first) * settings.tied
        for group in optimizer.param_groups:
            group["lr"] = lr * (settings.span_rate if tied and group["retrieves"] else 1.0)
        torch.manual_seed(zlib.crc32(f"{run.seed} {stage} {step} {rank}".encode()))              # dropout
        whole = next_batch(step)
        batch = whole.part(rank, size).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts = losses(model, batch)
            loss = sum(weight * share for weight, share in parts.values())
        optimizer.zero_grad()
        loss.backward()
        ann.sum_gradients(model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        values = {name: float(ann.sum_over_processes(share.detach(), device)) for name, (_, share) in parts.items()}
        if not np.isfinite(sum(values.values())) or not torch.isfinite(norm):
            passages = whole.passage[whole.passage >= 0].unique().tolist()
            raise UserError(f"{stage}: the loss is not a number at step {step} ({values}; its batch: "
                           f"{f'passages {str(passages[:64])[1:-1]}' if passages else 'examples'}); nothing was saved "
                           f"since the last checkpoint, {path}; a lower learning rate is the usual cure")
        optimizer.step()
        step += 1
        n_tokens += int(ann.sum_over_processes(batch.attention_mask.sum(), device))
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
        sums["steps"] = sums.get("steps", 0) + 1
        progress.update()
        progress.set_postfix({name: f"{value:.2f}" for name, value in values.items()}, refresh=False)
        if step % settings.log_every == 0 or step == schedule.steps:
            n_steps = sums.pop("steps")
            means = {name: round(value / n_steps, 4) for name, value in sums.items()}
            seconds = time.time() - since
            measured = evaluate(model)
            model.train()
            run.log({"stage": stage, "step": step, "processes": size, "lr": lr, **means,
                     "tokens_per_second": round(n_tokens / seconds), **measured})
            progress.clear()
            say(f"{stage} {step:5d}  " + "  ".join(f"{name} {value:.3f}" for name, value in means.items())
                + f"  {describe(measured)}")
            if "score" in measured and (best is None or measured["score"] > best):
                best = measured["score"]
                best_weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
            sums, n_tokens, since = {}, 0, time.time()
        stop = int(ann.sum_over_processes(len(interrupted), device)) > 0
        if step % settings.save_every == 0 or step == schedule.steps or stop:
            save()
        if stop:
            raise Stop(f"Stopped at step {step} of {stage} and saved; the same command goes on from there.")
    progress.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    ann.barrier()           # nobody reads the checkpoint before it is written


def read_log(path):
    """The lines of log.jsonl, each with what it says."""
    lines = []
    for n, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
            lines.append((line, record | {"stage": str(record["stage"]), "step": int(record["step"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{n}: damaged ({error}); take this line out") from None
    return lines


def trim_log(path, stage, step):
    """Forget log lines of this stage after `step`: a stage that goes on writes them again."""
    if path.exists():
        kept = [line for line, record in read_log(path) if record["stage"] != stage or record["step"] <= step]
        write_file(path, lambda file: file.writelines(kept))


def describe(measured):
    """The log's evaluation in a few words."""
    parts = []
    for kind in ("seen", "unseen"):
        if kind in measured and measured[kind]["n"]:
            m = measured[kind]
            parts.append(f"{kind}: masked mentions {m['accuracy']:.2f} (same entity: visible {m['mass_visible']:.2f}, "
                         f"masked {m['mass_masked']:.2f})")
    return "  ".join(parts) + (f"dev {measured['score']:.3f}" if "score" in measured else "")


class Epochs:
    """An endless sequence of items, epoch after epoch: order(epoch) -> int64 array, always of the same length.

    Nothing of it needs to be saved: the items of a step follow from the step."""

    def __init__(self, order):
        self.order, self.epoch, self.items = order, 0, order(0)

    def at(self, step, batch_size):
        first, batch = step * batch_size, []
        while batch_size:
            epoch, offset = divmod(first, len(self.items))
            if epoch != self.epoch:
                self.epoch, self.items = epoch, self.order(epoch)
            batch.append(self.items[offset:offset + batch_size])
            first, batch_size = first + len(batch[-1]), batch_size - len(batch[-1])
        return np.concatenate(batch)


# ---------------------------------------------------------------------------------------------------------------------
# The stages


def stage_batch_tome(run, schedule):
    """Mention Encoder and BATCH-TOME, on related passages (§2.3, app. A.1)."""
    settings, corpus = run.settings, run.corpus
    passages = np.flatnonzero(~corpus.held_out)
    if not len(passages):
        raise UserError(f"{run.out / 'corpus'}: all of its passages are held out, there is none to train on; add articles, or "
                       'a field "split": "train"')

    def clusters(epoch):
        whole = data.related_clusters(corpus, settings.cluster, run.seed * 1000 + epoch, passages)
        if len(whole) > 1:
            whole = [c for c in whole if len(c) == settings.cluster]        # the last one may be smaller
        return np.concatenate([whole[i] for i in np.random.default_rng([run.seed, epoch]).permutation(len(whole))])

    epochs = Epochs(clusters)
    # coreference only over the most frequent entities: the rest is not linked for this loss
    bar = np.sort(corpus.entity_count)[-min(max(settings.coref_entities, 1), len(corpus.entity_count))]
    frequent = torch.from_numpy(np.asarray(corpus.entity_count) >= max(bar, 1)).to(run.device)
    mentions = sample_eval_mentions(run, settings.eval_mentions)
    support = supporting_passages(corpus, mentions)
    begun = run.init and (run.out / "batch-tome.pt").exists()       # then the BERT need not be read again
    model = BatchTOME(TOME(run.batch_tome_config)) if begun else new_batch_tome(run)
    first, attends = run.first_with_memory(schedule), True

    def next_batch(step):
        nonlocal attends
        attends = step >= first
        if first and step == first:
            say("Fitting keys and queries to what the layers hold (tome.fit_retrieval); from here on the memory is attended.")
            sample = np.random.default_rng(run.seed).permutation(passages)[:768]
            fit_retrieval(model.eval(), [data.make_batch(corpus, part, None, 0, 0, None).to(run.device)
                                         for part in np.array_split(sample, -(-len(sample) // 32))])
            model.train()
        return data.make_batch(corpus, epochs.at(step, schedule.batch), np.random.default_rng([run.seed, 1, step]),
                               settings.mention_rate, settings.token_rate, settings.mentions)

    def losses(model, batch):
        H, _ = model(batch, attends)
        z = model.coref(H, batch.row, batch.start, batch.end)
        return {"mlm": (1 - settings.coref_weight, mlm_loss(model.tome.mlm_logits(H, batch.target_index), batch.target)),
                "coref": (settings.coref_weight,
                          coreference_loss(z, torch.where(frequent[batch.entity], batch.entity, 0), batch.passage))}

    def evaluate(model):
        rank, size = ann.rank_and_size()
        rows = encode_passages(model.encoder, corpus, support[rank::size], run.device)
        return evaluate_memory(run, model.tome, MentionMemory.from_arrays(rows, run.device), mentions)

    train_stage(run, "batch-tome", model, schedule, next_batch, losses, evaluate, {})


def evaluate_memory(run, tome, memory, mentions):
    """masked_mentions with the memory, emptied and shuffled."""
    measured = masked_mentions(tome, run.corpus, memory, mentions, run.device)
    if not isinstance(memory, MentionMemory):
        return measured
    for control, changed in (("emptied", memory.emptied()), ("shuffled", memory.shuffled())):
        for kind, values in masked_mentions(tome, run.corpus, changed, mentions, run.device).items():
            measured[kind][control] = values["accuracy"]
    return measured


def stage_memory(run, more=None):
    """The Mention Encoder reads the whole corpus (§2.1.2). more: a corpus file to add to it, without training."""
    folder = run.out / "memory"
    encoder = load_batch_tome(run).encoder
    past = [earlier["file"] for earlier in run.corpus.meta["grew_from"]]
    if more and checksum(more) not in past:         # else a command that was cut off is run again
        if ann.rank_and_size()[0] == 0:
            run.corpus.extend(more, run.tokenizer)
        ann.barrier()
        n, run.corpus = len(run.corpus.article), data.Corpus.open(run.corpus.folder)
        say(f"memory: {len(run.corpus.article) - n:,} passages of {more} added to {n:,}.")
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder, encoder.fingerprint)
        if manifest["corpus"] not in [earlier["corpus"] for earlier in run.corpus.meta["grew_from"]]:
            read_manifest(folder, corpus=run.corpus.fingerprint)
            say(f"memory: already built ({folder}, {manifest['n']:,} mentions).")
            return
    build_memory(encoder, run.corpus, folder, run.device, np.dtype(run.settings.memory_dtype))
    manifest = read_manifest(folder)
    say(f"memory: {manifest['n']:,} linked mentions, d_K {manifest['key_dim']}, d_V {manifest['value_dim']}, in {folder}")


def open_memory(run, tome, fingerprint):
    """The memory of the whole corpus, and the part of it that training sees: passages that are not held out. A
    baseline's is its table of entities, which is part of it."""
    if tome.entities is not None:
        return tome.entities, tome.entities
    memory = load_memory(run.out / "memory", fingerprint, run.device,
                         corpus=run.corpus.fingerprint).bucketed(run.n_search)
    train = torch.from_numpy(~np.asarray(run.corpus.held_out)).to(run.device)[memory.passage]
    return memory, memory if bool(train.all()) else memory.select(train)


def start_from(run, tome, start):
    """Weights of another checkpoint, or fresh ones ("scratch"), instead of those of the stage before (app. B.6). None:
    leave them. What a checkpoint lacks, as the memory layers where it had none, is fresh.

    Fresh weights are not those that BATCH-TOME began with: beside them, what wrote the memory would be no stranger."""
    if start is None:
        return
    state = split_into_blocks(new_batch_tome(run, run.seed + 1).tome.state_dict(), run.config)
    if start != "scratch":
        checkpoint = read_checkpoint(Path(start))
        saved = checkpoint.get("best", checkpoint["model"])
        if any(saved[name].shape != fresh.shape if name in saved else name.startswith("initial.")
               for name, fresh in state.items()):
            raise UserError(f"--start {start}: no TOME of these dimensions; give a tome.pt, claims.pt or qa.pt of such a run "
                           "(a batch-tome.pt is what stage tome starts from without --start)")
        state |= {name: tensor for name, tensor in saved.items() if name in state}
    tome.load_state_dict(state)


def stage_tome(run, schedule, start=None):
    """TOME over the frozen memory, on passages at random (§2.4)."""
    settings, corpus = run.settings, run.corpus
    has_encoder = run.config.memory == "mentions"               # a baseline has none
    batch_tome = load_batch_tome(run) if has_encoder else new_batch_tome(run)
    fingerprint = batch_tome.encoder.fingerprint if has_encoder else None
    tome = TOME(run.config).to(run.device)
    tome.load_state_dict(split_into_blocks(batch_tome.tome.state_dict(), run.config))
    memory, training_memory = open_memory(run, tome, fingerprint)
    if has_encoder:
        training_memory = training_memory.sample(settings.memory_fraction, run.seed)
    start_from(run, tome, start)
    passages = np.flatnonzero(~corpus.held_out)
    epochs = Epochs(lambda epoch: np.random.default_rng([run.seed, 2, epoch]).permutation(passages))
    mentions = sample_eval_mentions(run, settings.eval_mentions)

    def next_batch(step):
        return data.make_batch(corpus, epochs.at(step, schedule.batch), np.random.default_rng([run.seed, 3, step]),
                               settings.mention_rate, settings.token_rate, settings.mentions)

    def losses(model, batch):
        H, layers = model(batch.tokens, batch.attention_mask, batch, training_memory)
        # Entities as Experts is told which row each linked mention is. So is the second memory layer of TOME-2: where one
        # retrieval is enough for MLM, it forgets its own.
        told = {"entities": layers, "mentions": layers[1:], "none": []}[run.config.memory]
        linking = {"linking": (settings.entity_weight, sum(
            entity_prediction_loss(layer.scores, layer.entity, batch.entity) for layer in told))} if told else {}
        z = model.answer(H, batch.row, batch.start, batch.end)
        found = training_memory.retrieve(z, batch.passage, model.config.k_answer,
                                         model.config.k_answer_shard)
        return {"mlm": (1 - settings.entity_weight, mlm_loss(model.mlm_logits(H, batch.target_index), batch.target)),
                "entity": (settings.entity_weight, entity_prediction_loss(found.scores, found.entity, batch.entity)),
                **linking}

    train_stage(run, "tome", tome, schedule, next_batch, losses,
                lambda model: evaluate_memory(run, model, memory, mentions), {"encoder": fingerprint, "start": start})


def read_examples(run, task, path, known=True):
    """Examples of a file, each with its mentions. known: only those with a label; an error where there are none."""
    examples = data.read_examples(path, task)
    if known:
        examples = [e for e in examples if task == "qa" or e.label is not None]
        if not any(e.label is not None or e.answers for e in examples):
            what = "claim has a label" if task == "claims" else "question has an answer that is an entity"
            raise UserError(f"{path}: no {what}, as in the test files of published tasks: there is nothing to learn "
                           "from or to compare with; python eval.py --show shows what is retrieved")
    missing = sum(e.mentions is None for e in examples)
    if missing:
        how, find = data.mention_finder(run.corpus.entity_names)
        say(f"{path}: mentions of {missing:,} examples found by {how}.", sys.stderr)
        examples = [e._replace(mentions=find(e.text)) if e.mentions is None else e
                    for e in tqdm(examples, "mentions", leave=False, disable=None)]
    if nothing := sum(not e.mentions for e in examples):
        say(f"{path}: {nothing:,} of {len(examples):,} examples have no mention, so nothing is looked up for them.", sys.stderr)
    return examples


def examples_file(run, task, path):
    """FILE, or that of the toy world."""
    path = Path(path) if path else run.out / "world" / f"{task}.one_hop.train.jsonl"
    if not path.exists():
        raise UserError(f"{path}: no such file; --examples wants a file of JSON lines (README, Your own corpus)")
    return path


def read_task_examples(run, task, path):
    """(training, dev) examples: FILE and the FILE whose name says dev instead of train, else a tenth of FILE."""
    path = examples_file(run, task, path)
    examples = read_examples(run, task, path)
    dev = path.with_name(path.name.replace("train", "dev"))
    if dev != path and dev.exists():
        return examples, read_examples(run, task, dev)
    if len(examples) < 2:
        raise UserError(f"{path}: one example cannot be learnt from and measured on; add more, or a file whose name says dev")
    order = np.random.default_rng(0).permutation(len(examples))
    n_dev = max(1, len(examples) // 10)
    return [examples[i] for i in order[n_dev:]], [examples[i] for i in order[:n_dev]]


def answerable(run, questions, path):
    """Those to train on: a question whose answer is no entity teaches nothing; in evaluation it counts as wrong (§4.4)."""
    known = [e for e in questions if any(a in run.corpus.entity_index for a in e.answers)]
    if not known:
        raise UserError(f"{path}: no question has an answer that is an entity of the corpus; name answers as the corpus "
                       "names its entities (data.py task maps those of published tasks)")
    say(f"{len(known):,} of {len(questions):,} questions to train on have an answer that is an entity of the corpus "
        f"({len(known) / len(questions):.1%}); the others are left out.")
    return known


def cloze(run, example, rng):
    """A claim that is true as a question: what does one of its mentions name? None if it names no entity of the corpus."""
    if example.label != data.CLAIM_LABELS.index("SUPPORTS"):
        return None
    known = [m.entity for m in example.mentions if m.entity in run.corpus.entity_index]
    known = [e for e in known if e == example.info.get("object")] or known      # the toy world's: the object is determined
    return example._replace(label=None, answers=[known[rng.integers(len(known))]]) if known else None


def wording(example):
    """The text without its mentions, as "… was born in the city of …."."""
    parts, at = [], 0
    for mention in sorted(example.mentions, key=lambda m: m[:2]):       # entities may be None
        parts.append(example.text[at:mention.start])
        at = max(at, mention.end)
    return "…".join([*parts, example.text[at:]])


def disguise(batch):
    """Every second cloze shows what the one before it hides, if that has as many words, in place of [MASK]s: as in a false
    claim, what is retrieved must follow from the rest of the sentence and not from the name that stands there. Clozes
    come sorted by their wording, so it is mostly a name that could be right."""
    asked = batch.answer_mention[batch.answer > 0]
    for shown, hidden in zip(asked[::2].tolist(), asked[1::2].tolist()):
        one, other = ((batch.row[m], slice(batch.start[m] + 1, batch.end[m])) for m in (shown, hidden))
        if torch.equal(batch.tokens[one], batch.tokens[other]):
            batch.tokens[other] = batch.unmasked[one]
    return batch


def examples_batch(run, task, examples):
    """A batch of examples as this run reads them; task None: only their texts."""
    return data.example_batch(examples, task, run.tokenizer, run.corpus.entity_index, max_length=run.settings.max_length,
                              claim_mask=task == "claims" and run.settings.claim_mask)


@torch.no_grad()
def task_accuracy(run, tome, task, examples, memory, without=None, attend=True, batch_size=64):
    """{"accuracy", "n"} and for questions "recall@20"; every process works on the whole batch.

    without: the field of an example ("subject", "bridge") whose article is taken out of the memory for that example.
    attend: False switches the memory layers off; the answer to a question is still looked up."""
    tome.eval()
    corpus, right, recalled = run.corpus, [], []
    entity_index = corpus.entity_index
    if without:
        memory = memory.by_article(corpus.article)
    for first in range(0, len(examples), batch_size):
        chosen = examples[first:first + batch_size]
        batch = examples_batch(run, task, chosen).to(run.device)
        if without:
            articles = torch.tensor([corpus.article_index.get(e.info.get(without), -1) for e in chosen], device=run.device)
            batch.passage = articles[batch.row]
        H, _ = tome(batch.tokens, batch.attention_mask, batch, memory if attend else None)
        if task == "claims":
            right += (claim_logits(tome, H, batch).argmax(-1) == batch.label).tolist()
            continue
        found = answer_question(tome, H, batch, memory)
        predicted = predict_entity(found.scores, found.entity).entity.tolist()
        for example, entity, top in zip(chosen, predicted, found.entity[:, :20].tolist()):
            answers = {entity_index.get(answer, -1) for answer in example.answers}
            right.append(entity in answers and entity > 0)
            recalled.append(any(e in answers and e > 0 for e in top))
    result = {"accuracy": float(np.mean(right)) if right else 0.0, "n": len(right)}
    if recalled:
        result["recall@20"] = float(np.mean(recalled))
    return result


def stage_finetune(run, task, schedule, examples_path, start=None, with_clozes=False):
    """TOME on claims (three labels, FEVER's) or questions (eq. 10 at an appended [MASK]); app. B.1.

    with_clozes: beside the claims in a batch stand as many true ones with a mention to be filled in, by the answer head (eq.
    10) and by the last memory layer's own query. From labels alone it does not learn to retrieve what two facts say."""
    tome, fingerprint = load_tome(run)
    memory, training_memory = open_memory(run, tome, fingerprint)
    start_from(run, tome, start)
    examples, dev = read_task_examples(run, task, examples_path)
    if task == "qa":
        examples = answerable(run, examples, examples_path)
    rng = np.random.default_rng([run.seed, 6])
    clozes = [question for e in examples if (question := cloze(run, e, rng))] if with_clozes else []
    if with_clozes and not clozes:
        raise UserError(f"{examples_path}: no claim that is true has a mention of an entity of the corpus; give mentions with "
                       "their entities (noun chunks have none), or leave out --cloze")
    epochs = Epochs(lambda epoch: np.random.default_rng([run.seed, 4, epoch]).permutation(len(examples)))
    beside = Epochs(lambda epoch: np.random.default_rng([run.seed, 5, epoch]).permutation(len(clozes)))
    if task == "claims":    # A label that no example has is ruled out: to unlearn it took toy claims with it, to chance.
        absent = set(range(len(data.CLAIM_LABELS))) - {e.label for e in examples}
        tome.claim.bias.data[list(absent)] = -1e4

    def next_batch(step):
        chosen = [examples[i] for i in epochs.at(step, schedule.batch)]
        if not clozes:
            return examples_batch(run, task, chosen)
        return disguise(examples_batch(run, task, chosen + sorted(
            (clozes[i] for i in beside.at(step, schedule.batch)), key=wording)))

    def losses(model, batch):
        H, layers = model(batch.tokens, batch.attention_mask, batch, training_memory)
        parts, weight = {}, run.settings.cloze_weight if clozes else 1.0
        if task == "claims":
            known = batch.label >= 0
            parts["claims"] = (1.0, share_of_mean(torch.nn.functional.cross_entropy(
                claim_logits(model, H, batch)[known].float(), batch.label[known], reduction="none")))
        if task == "qa" or clozes:
            asked = batch.answer_mention[batch.answer > 0]
            parts["qa"] = (weight, answer_loss(model, training_memory, answer_query(model, H, batch, asked), batch, run.settings.whole_softmax))
            if clozes and layers[-1] is not None:
                parts["asked"] = (weight, answer_loss(model, training_memory, layers[-1].query[asked], batch,
                                                     run.settings.whole_softmax))
        return parts

    def evaluate(model):
        return {"score": task_accuracy(run, model, task, dev, memory)["accuracy"]}

    read = (examples, dev, clozes) if clozes else (examples, dev)
    train_stage(run, task, tome, schedule, next_batch, losses, evaluate,
                {"encoder": fingerprint, "start": start, "examples": zlib.crc32(repr(read).encode())})


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def finished(run, stage):
    """Whether a stage has left its result."""
    if stage == "memory":
        folder = run.out / "memory"
        return (folder / "manifest.json").exists() and read_manifest(folder)["corpus"] == run.corpus.fingerprint
    checkpoint = load_checkpoint(run.out / f"{stage}.pt", stage, run)
    return checkpoint is not None and checkpoint["step"] >= checkpoint["steps"]


def whole(least):
    def number(text):
        if not text.isdecimal() or not least <= int(text) < 2 ** 63:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)
    return number


def rate(text):
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10:
        raise argparse.ArgumentTypeError(f"{text} is not a learning rate, a number above 0 such as 1e-3")
    return number


def one_setting(text):
    """NAME=VALUE -> (name, value), of the type that the field has."""
    known = {f.name: f.default for f in (*fields(Settings), *fields(Config)) if isinstance(f.default, (int, float, str))
             and f.name not in ("n_blocks", "vocab_size", "n_entities")}       # --blocks, and two that the corpus decides
    name, _, value = text.partition("=")
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name} is no setting; there are {', '.join(sorted(known))}")
    kind = type(known[name])
    try:
        value = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text}: {name} is a {kind.__name__}") from None
    if name == "memory" and value not in ("mentions", "entities", "none"):
        raise argparse.ArgumentTypeError("memory is mentions, entities or none")
    return name, value


def add_search_arguments(parser):
    parser.add_argument("--search", choices=("exact", "bucketed"), default="exact", help="of the memory (app. C.1)")
    parser.add_argument("--n-search", type=whole(1), help="buckets that --search bucketed looks into (default 32), of "
                        "4 sqrt(N) for N memories in a process")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description="Train TOME, stage by stage.", allow_abbrev=False)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--preset", choices=list(PRESETS))
    parser.add_argument("--corpus", help="JSON lines, plain or .gz (README, Your own corpus); none: the toy world")
    parser.add_argument("--out", help="folder of the run (default: runs/<preset>)")
    parser.add_argument("--blocks", type=int, choices=(1, 2), help="TOME-1 or TOME-2")
    parser.add_argument("--task", choices=("claims", "qa"), help="for --stage finetune")
    parser.add_argument("--examples", help="training examples for --stage finetune (default: the toy world's, one hop)")
    parser.add_argument("--cloze", action="store_true", help="with --task claims: true claims with a mention to be filled in "
                        "stand beside them, by which the last memory layer learns what to retrieve there")
    parser.add_argument("--steps", type=whole(1), help="instead of the preset's, for the stage named")
    parser.add_argument("--batch", type=whole(1), help="passages or examples a step, likewise")
    parser.add_argument("--lr", type=rate, help="largest learning rate, likewise")
    parser.add_argument("--seed", type=whole(0))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--init", help="folder of a BERT checkpoint that batch-tome starts from")
    parser.add_argument("--append", metavar="FILE", help="a corpus file that --stage memory adds to the memory of a "
                        "trained run: nothing is trained again")
    parser.add_argument("--start", metavar="FILE", help="checkpoint whose weights stage tome or finetune starts from, "
                        "instead of the stage before; scratch: fresh ones")
    parser.add_argument("--set", action="append", type=one_setting, metavar="NAME=VALUE", help="a field of Settings or "
                        "Config other than the preset's, such as memory=entities (a baseline); may be repeated")
    parser.add_argument("--quiet", action="store_true", help="no report at the end")
    add_search_arguments(parser)
    args = parser.parse_args(argv)
    args.set = dict(args.set) if args.set else None
    args.out = args.out or f"runs/{args.preset or 'toy'}"
    if args.append and args.stage != "memory":
        parser.error("--append goes with --stage memory")
    if args.start and args.stage not in ("tome", "finetune"):
        parser.error("--start goes with --stage tome and --stage finetune")
    if (args.stage == "finetune") != (args.task is not None):
        parser.error("--task goes with --stage finetune, and --stage finetune needs it")
    if args.examples and args.stage != "finetune":
        parser.error("--examples goes with --stage finetune")
    if args.cloze and args.task != "claims":
        parser.error("--cloze goes with --stage finetune --task claims")
    if (args.steps or args.batch or args.lr) and args.stage == "memory":
        parser.error("--steps, --batch and --lr do not go with --stage memory: it reads the corpus once")
    return args


def train(args):
    # what is wrong is said before hours of training, not after
    for name, what in (("examples", "file of JSON lines (see the README)"), ("append", "file of JSON lines (see the README)"),
                       ("start", "checkpoint, or scratch")):
        path = getattr(args, name)
        if path and not Path(path).exists() and (name, path) != ("start", "scratch"):
            raise UserError(f"{path}: no such file; --{name} wants a {what}")
    run = make_run(args)
    if args.stage == "finetune":
        data.read_examples(examples_file(run, args.task, args.examples), args.task)
    baseline = run.config.memory != "mentions"      # it has no Mention Encoder to train, so no stages before tome
    if baseline and args.stage in STAGES[:2]:
        raise UserError(f"--stage {args.stage}: this run is of a baseline without mention memory; begin with --stage tome")
    for stage in STAGES[2 * baseline:STAGES.index(args.stage) + 1]:
        last = stage == args.stage
        if not last and finished(run, stage):
            continue
        if not last:
            say(f"Stage {stage} comes first.")
        started = time.time()
        name = args.task if stage == "finetune" else stage
        schedule = run.settings.schedule.get(name)
        if stage == "tome" and baseline:        # as many steps as TOME has had then
            first = run.settings.schedule["batch-tome"]
            schedule = replace(first, steps=first.steps + schedule.steps)
        if schedule is not None:        # --steps, --batch and --lr, or what this stage was started with, or the preset's
            if run.init and stage != "finetune":
                schedule = replace(schedule, lr=schedule.lr * run.settings.bert_rate)
            begun = load_checkpoint(run.out / f"{name}.pt", name, run) or asdict(schedule)
            steps, batch, lr = ((getattr(args, name) if last else None) or begun[name] for name in ("steps", "batch", "lr"))
            schedule = Schedule(steps, lr, min(schedule.warmup, steps // 10), batch)
        if stage == "batch-tome":
            stage_batch_tome(run, schedule)
        elif stage == "memory":
            stage_memory(run, args.append if last else None)
        elif stage == "tome":
            stage_tome(run, schedule, args.start if last else None)
        else:
            stage_finetune(run, args.task, schedule, args.examples, args.start, args.cloze)
        say(f"Stage {stage} done in {time.time() - started:.0f} s.")
    return run


def main(argv=None):
    args = parse_arguments(argv)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    handlers = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if several:
            cuda = args.device != "cpu" and torch.cuda.is_available()
            if cuda:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # A process that dies closes its connections: the others know at once. The limit is for those that are
            # alive and wait, above all while the first one tokenises the corpus.
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(days=1))
        with alone_in(args.out):
            run = train(args)
        if args.stage != "memory" and not args.quiet:
            import eval as evaluation       # the report at the end is eval.py's; it imports this file
            evaluation.report(run, args.stage, args.task)
        return 0
    except Stop as stop:
        say(str(stop))
        return 130
    except (UserError, CheckpointError, OSError) as error:
        tqdm.write(f"train.py: {error}", file=sys.stderr)       # on a line of its own, not behind a progress bar
        return 1
    except RuntimeError as error:           # gloo has no exception of its own
        if not (several and ("gloo" in str(error) or isinstance(error, dist.DistError))):
            raise
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]       # without the place in gloo's source
        tqdm.write(f"train.py: another process has ended or cannot be reached ({reason}); the same command goes on from "
                   "the last checkpoint", file=sys.stderr)
        return 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if several and dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    import train            # under its own name: eval.py imports it too, and there must be one of each exception
    sys.exit(train.main())
