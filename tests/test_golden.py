"""Compares this project's modules with arrays from the paper's public JAX code (tests/golden).

    python -m pytest tests/test_golden.py -s        # -s prints the largest difference in each comparison

With the same weights and inputs in float32, outputs agree to within 1e-5 (relative if above 1), and gradients to
within 1e-4 of the parameter's largest gradient. Where we deliberately differ from the public code, the test says so,
compares our result with numpy's, and derives the public code's number from ours through that difference alone.
"""
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ann
import data
from encoder import Config, MLMHead, TransformerBlock
from memory import MemoryAttention, MentionMemory
from tome import (TOME, BatchTOME, attention_weights, coreference_loss, entity_prediction_loss, mlm_loss,
                  predict_entity)

FOLDER = Path(__file__).parent / "golden"
OUR_HEADS = {"entity_query", "claim"}
CONFIG = Config(vocab_size=97, hidden=32, n_heads=4, intermediate=64, n_initial=2, n_upper=2, n_blocks=1,
                max_positions=24, dropout=0.0, key_dim=8, value_dim=16, coref_dim=16, k=8, k_shard=8, k_answer=16)
LARGEST = defaultdict(lambda: {"forward": 0.0, "gradient": 0.0})        # comparison -> largest differences

@pytest.fixture(scope="module", autouse=True)
def print_the_largest_differences():
    yield
    print("\n\nlargest difference              forward    gradient")
    for name, d in LARGEST.items():
        print(f"{name:28s}  {d['forward']:10.1e}" + (f"  {d['gradient']:10.1e}" if d["gradient"] else ""))

# ---- Comparing, and translating the public code's names into ours

def golden(name, device=None):
    """{name: tensor} of a file. device: if given, return only this device's inputs."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key] if device is None or key[:3] != "in/" else file[key][device])
                for key in file.files}

def record(name, kind, difference):
    LARGEST[name][kind] = max(LARGEST[name][kind], float(difference))
    return difference

def same_forward(name, ours, theirs):
    assert ours.shape == theirs.shape
    difference = (ours.detach() - theirs).abs()
    record(name, "forward", difference.max())
    assert (difference < 1e-5 * theirs.abs().clamp(min=1)).all(), f"{name}: {difference.max():.2e}"

def same_gradients(name, ours, theirs, zero=()):
    """Compares two dictionaries of the same parameters' gradients. zero: parameters whose gradient is 0 except for
    rounding, so that a relative difference is meaningless."""
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].shape == theirs[key].shape, key
        if key in zero:
            assert max(ours[key].abs().max(), theirs[key].abs().max()) < 1e-7
            continue
        difference = record(name, "gradient", (ours[key] - theirs[key]).abs().max() / theirs[key].abs().max())
        assert difference < 1e-4, f"{name}, gradient of {key}: {difference:.2e}"

def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if not OUR_HEADS & set(name.split("."))}

def load(module, state):
    """Loads `state`, which contains all parameters except those of the heads that only our model has."""
    left_out, unknown = module.load_state_dict(state, strict=False)
    assert not unknown and all(OUR_HEADS & set(name.split(".")) for name in left_out), (left_out, unknown)
    return module

def linear(z, path, name):
    """Weight and bias of a layer. Kernels are [in, out]; in attention [hidden, heads, dim] or [heads, dim, hidden]."""
    kernel, bias = z[path + "/kernel"], z[path + "/bias"].flatten()
    return {name + ".weight": kernel.reshape(-1, len(bias)).T, name + ".bias": bias}

def norm(z, path, name):
    return {name + ".weight": z[path + "/scale"], name + ".bias": z[path + "/bias"]}

def transformer(z, path, name):
    """Weights of a TransformerBlock, or their gradients, which are translated in the same way."""
    state = {}
    for i in range(sum(key.startswith(path) and key.endswith("mlp/bias") for key in z)):
        ours, layer = f"{name}layers.{i}.", f"{path}/layer_sequence/layers_{i}"
        a, m = layer + "/attention_block", layer + "/mlp_block"
        qkv = [linear(z, f"{a}/attention_layer/{part}", "") for part in ("query", "key", "value")]
        state |= {ours + "attention.qkv" + end: torch.cat([part[end] for part in qkv]) for end in (".weight", ".bias")}
        state |= {**linear(z, a + "/attention_layer/out", ours + "attention.out"),
                  **norm(z, a + "/layer_norm", ours + "attention_norm"), **linear(z, m + "/mlp", ours + "up"),
                  **linear(z, m + "/dense", ours + "down"), **norm(z, m + "/layer_norm", ours + "norm")}
    return state

def memory_attention(z, path, name):
    return {**linear(z, path + "query_projector", name + "query.linear"),
            **linear(z, path + "update_layer/retrieval_projector", name + "up"),
            **norm(z, path + "update_layer/layer_norm", name + "norm")}

def mlm_head(z, path, name):
    return {**linear(z, path + "dense", name + "dense"), **norm(z, path + "layer_norm", name + "norm"),
            name + "bias": z[path + "bias"]}

def tome_state(z, blocks, path="param/"):
    """Weights or gradients of a TOME with 1 or 2 blocks, without its heads for entity prediction and claims."""
    e = path + "encoder/"
    layers = ["memory_attention_layer"] if blocks == 1 else ["intermediate_memory_attention_layer",
                                                             "final_memory_attention_layer"]
    state = {f"embeddings.{ours}.weight": z[f"{e}embedder/embedders_{theirs}_ids/embedding"]
             for ours, theirs in (("word", "token"), ("position", "position"), ("segment", "segment"))}
    state |= norm(z, e + "embeddings_layer_norm", "embeddings.norm") | mlm_head(z, path + "mlm_layer/", "mlm.")
    state |= transformer(z, e + "initial_encoder", "initial.")
    for i, (layer, encoder) in enumerate(zip(layers, ["intermediate_encoder", "final_encoder"][-blocks:])):
        state |= memory_attention(z, f"{e}{layer}/", f"blocks.{i}.memory_attention.")
        state |= transformer(z, e + encoder, f"blocks.{i}.transformer.")
    return state

def new_tome(blocks):
    """A TOME of the golden size. With two blocks, the first has 1 layer and the second 2, as in the public model."""
    tome = TOME(replace(CONFIG, n_upper=2 * blocks, n_blocks=blocks))
    if blocks == 2:
        del tome.blocks[0].transformer.layers[1]
    return tome

def mentions_of(z):
    """row, start, end and passage of the mentions that are not padding, and `real`, the mask that selects them."""
    real = z["in/mention_mask"] > 0
    row, start, end = (z[f"in/mention_{name}_positions"][real].long() for name in ("batch", "start", "end"))
    return SimpleNamespace(row=row, start=start, end=end, passage=z["in/text_identifiers"][real].long(), real=real)

def targets_of(z):
    """(row, column) of the masked tokens, in the public code's order, and the original tokens."""
    at = z["in/mlm_target_weights"] > 0
    return (at.nonzero()[:, 0], z["in/mlm_target_positions"][at].long()), z["in/mlm_target_ids"][at].long()

def batch_of(z):
    m, targets = mentions_of(z), z["in/mention_target_weights"] > 0
    entity = torch.zeros(len(m.row), dtype=torch.int64)
    entity[z["in/mention_target_indices"][targets].long()] = z["in/mention_target_ids"][targets].long()
    tokens = z["in/text_ids"].long()
    is_target = torch.zeros_like(tokens, dtype=torch.bool)
    is_target[targets_of(z)[0]] = True
    nothing = torch.full_like(m.row, -1)
    return data.Batch(tokens=tokens, unmasked=tokens, attention_mask=z["in/text_mask"] > 0, row=m.row, start=m.start,
                      end=m.end, entity=entity, passage=m.passage, is_target=is_target, mention=nothing,
                      answer=nothing, label=torch.full((len(tokens),), -1))

def memory_of(z, kind=MentionMemory, passage="in/memory_identifiers"):
    keys, values = z["in/memory_keys"], z["in/memory_values"]
    return kind(keys, values, z["in/memory_entity_ids"].long(), z[passage].long(), torch.arange(len(keys)))

class RemovedAfterwards(MentionMemory):
    """The public code's rule: search all rows, then empty the places of rows from the mention's own passage."""

    def retrieve(self, query, passage, k, k_shard):
        found = super().retrieve(query, torch.full_like(passage, -1), k, k_shard)
        own = ann.fetch(found.ids, [self.passage])[0] == passage[:, None]
        return found._replace(scores=found.scores.masked_fill(own, -torch.inf))

def top_allowed(z, queries, passages, k):
    """Our rule in numpy: for each query, a list of the ids of the k best rows from other passages, best first."""
    scores = queries.numpy() @ z["in/memory_keys"].numpy().T
    return [[i for i in np.argsort(-row) if z["in/memory_identifiers"][i] != passage][:k]
            for row, passage in zip(scores, passages)]

# ---- Transformer and MLM head

def test_a_transformer_block_matches_the_public_code_on_padded_passages_with_gradients():
    z = golden("transformer")
    block = load(TransformerBlock(CONFIG, 2), transformer(z, "param", ""))
    x, mask = z["in/encoding"].requires_grad_(), z["in/attention_mask"] > 0
    H = block(x, mask)
    same_forward("transformer block", H[mask], z["out/encoding"][mask])      # padding is not compared
    (H * z["in/cotangent"]).sum().backward()                                # the cotangent is 0 at padding
    same_gradients("transformer block", {"x": x.grad, **gradients(block)},
                   {"x": z["grad/in_encoding"], **transformer(z, "grad_param", "")})

def test_the_mlm_head_matches_the_public_codes_logits_and_loss():
    z = golden("mlm_head")
    head = load(MLMHead(CONFIG), mlm_head(z, "param/", ""))
    positions = z["in/mlm_target_positions"].long()
    logits = head(z["in/encoding"][torch.arange(3)[:, None], positions], z["in/shared_embedding"])
    same_forward("MLM head", logits, z["out/mlm_logits"])
    real = z["in/mlm_target_weights"] > 0
    same_forward("MLM loss", mlm_loss(logits[real], z["in/mlm_target_ids"][real].long()),
                 z["out/loss_sum"] / z["out/denominator"])

# ---- Memory attention, eq. 6-9

def attend(z, memory, k=8, k_shard=None, anyones=False):
    """(layer, H, mentions, M, Retrieved) of MemoryAttention with the golden weights over `memory`."""
    layer = load(MemoryAttention(replace(CONFIG, k=k, k_shard=k_shard or k)), memory_attention(z, "param/", ""))
    H, mentions = z["in/encoding"].clone().requires_grad_(), mentions_of(z)
    if anyones:                                                 # nothing is disallowed: no row is from passage -1
        mentions.passage = torch.full_like(mentions.passage, -1)
    return layer, H, mentions, *layer(H, mentions, memory)

@pytest.mark.parametrize("case, k", [("disallow", 8), ("allow", 8), ("post4", 4), ("all_disallowed", 8)])
def test_memory_attention_with_their_removal_rule_matches_their_ids_weights_and_output(case, k):
    z = golden("memory_attention")
    passage = "in/memory_identifiers" if case != "all_disallowed" else "all_disallowed/in_memory_identifiers"
    layer, H, mentions, M, found = attend(z, memory_of(z, RemovedAfterwards, passage), k, anyones=case == "allow")
    theirs = {name.split("/")[1]: value for name, value in z.items() if name.startswith(case + "/")}
    weights = theirs["memory_attention_weights"][mentions.real].clone()
    expected = theirs["encoding"].clone()
    if case == "all_disallowed":
        # For mention 0, nothing is left. The public code averages the disallowed values; we add nothing.
        assert theirs["memory_attention_disallowed_mask"][0].all() and bool((weights[0] == 1 / 8).all())
        assert not found.weights[0].any() and not found.value[0].any()
        weights[0] = 0.0
        place = mentions.row[0], mentions.start[0]
        average = layer.up(theirs["top_values"][0].mean(0))
        same_forward("memory attention", layer.norm(H[place] + average), expected[place])
        expected[place] = layer.norm(H[place]).detach()
    same_forward("memory attention", layer.query(H, mentions.row, mentions.start, mentions.end),
                 theirs["memory_attention_mention_encodings"][mentions.real])
    assert torch.equal(found.ids, theirs["top_memory_ids"][mentions.real].long())
    assert torch.equal(found.entity, theirs["top_entity_ids"][mentions.real].long())
    same_forward("memory attention", found.weights, weights)
    same_forward("memory attention", M, expected)
    if case == "disallow":
        (M * z["disallow/in_cotangent"]).sum().backward()
        same_gradients("memory attention", {"H": H.grad, **gradients(layer)},
                       {"H": z["disallow/grad_in_encoding"], **memory_attention(z, "disallow/grad_param/", "")})

def test_over_the_whole_memory_both_removal_rules_agree_and_match_their_output():
    z = golden("memory_attention")
    _, _, mentions, M, found = attend(z, memory_of(z), k=64)
    same_forward("memory attention", M, z["full_memory/encoding"])
    own = z["full_memory/memory_attention_disallowed_mask"][mentions.real]
    for ids, weights, their_ids, disallowed, their_weights in zip(
            found.ids, found.weights, z["full_memory/top_memory_ids"][mentions.real], own,
            z["full_memory/memory_attention_weights"][mentions.real]):
        n = int((~disallowed).sum())
        assert ids[:n].tolist() == their_ids[~disallowed].tolist() and (ids[n:] == -1).all()
        same_forward("memory attention", weights[:n], their_weights[~disallowed])

@pytest.mark.parametrize("case", ["no_positive", "no_negative"])
def test_coreference_loss_is_zero_and_finite_if_there_is_no_positive_or_no_negative(case):
    z = golden("coreference")
    encodings = z["in/mention_encodings"].requires_grad_()
    loss = coreference_loss(encodings, z[f"{case}/in_ids"].long(), z["in/mention_batch_positions"].long())
    assert loss == z[f"{case}/loss_sum"] == 0
    loss.backward()
    assert not encodings.grad.any()

def test_a_mention_with_positives_but_no_negative_counts_in_our_coreference_loss_but_not_in_theirs():
    z = golden("coreference")
    encodings, passage = z["in/mention_encodings"], z["in/mention_batch_positions"].long()
    entity = torch.full_like(passage, 7)
    entity[0] = 9                                       # so entity 7 in passage 0 has no negative elsewhere
    e, p, scores = entity.tolist(), passage.tolist(), (encodings.double() @ encodings.double().T).tolist()
    sums, with_positive, with_both = 0.0, 0, 0          # the public code's rule, one pair at a time
    for i in range(18):
        positives = [scores[i][j] for j in range(18) if p[i] != p[j] and e[i] == e[j]]
        negatives = [scores[i][j] for j in range(18) if p[i] != p[j] and e[i] != e[j]]
        with_positive += bool(positives)
        if positives and negatives:
            with_both += 1
            sums += np.mean([np.logaddexp.reduce([s, *negatives]) - s for s in positives])
    assert 0 < with_both < with_positive
    same_forward("coreference loss", coreference_loss(encodings, entity, passage),
                 torch.tensor(sums / with_positive, dtype=torch.float32))

# ---- Two processes, each with its shard of the memory and its own passages

def coreference_of_two_devices():
    z = golden("coreference")
    encodings, row, entity = (z[f"two_devices/in_{name}"] for name in ("encodings", "batch_positions", "ids"))
    return encodings, entity.long(), row.long() + torch.tensor([[0], [100]])

def process_of_two(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    z, results = golden("memory_attention_two_devices", rank), {}
    for case, k_shard in (("k_half_per_device", 4), ("k_per_device_post_k", 8)):
        *_, M, found = attend(z, memory_of(z, RemovedAfterwards), 8, k_shard)
        results[case] = (M.detach(), *(x.detach() for x in found[:4]))
    encodings, entity, passage = coreference_of_two_devices()
    z = encodings[rank].requires_grad_()
    share = coreference_loss(z, entity[rank], passage[rank])
    share.backward()
    results["coreference"] = share.detach(), z.grad
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()

@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(process_of_two, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]

@pytest.mark.slow
@pytest.mark.parametrize("case", ["k_half_per_device", "k_per_device_post_k"])
def test_two_processes_find_what_two_devices_of_the_public_code_find(case, two_processes):
    z = golden("memory_attention_two_devices")
    for device, results in enumerate(two_processes):
        M, scores, ids, entity, weights = results[case]
        real = z["in/mention_mask"][device] > 0
        theirs = {name: z[f"{case}/{name}"][device][real] for name in
                  ("top_memory_ids", "top_entity_ids", "memory_attention_weights", "memory_attention_disallowed_mask")}
        order = z[f"{case}/memory_attention_scores_with_disallowed"][device][real].argsort(1, descending=True)
        theirs = {name: value.gather(1, order) for name, value in theirs.items()}     # the public code groups by device
        assert torch.equal(ids, theirs["top_memory_ids"].long())
        assert torch.equal(entity, theirs["top_entity_ids"].long())
        same_forward("two shards", weights, theirs["memory_attention_weights"])
        same_forward("two shards", M, z[f"{case}/encoding"][device])

def test_two_processes_shares_of_the_coreference_loss_match_the_two_devices_sums(two_processes):
    z = golden("coreference")
    shares, grads = zip(*(results["coreference"] for results in two_processes))
    counted = z["two_devices/denominator"].sum()
    same_forward("coreference loss", torch.stack(shares), z["two_devices/loss_sum"] / counted)
    encodings, *ids = (x.flatten(0, 1) for x in coreference_of_two_devices())       # the gradients equal those of
    coreference_loss(encodings.requires_grad_(), *ids).backward()                   # one process with both batches
    same_gradients("coreference loss", {"z": torch.cat(grads)}, {"z": encodings.grad})

# ---- The losses

def test_coreference_loss_and_gradient_match_the_public_code_with_padding_and_unlinked_mentions():
    z = golden("coreference")
    encodings, entity = z["in/mention_encodings"].requires_grad_(), z["in/mention_target_ids"].long()
    loss = coreference_loss(encodings, entity, z["in/mention_batch_positions"].long())
    counted = z["dot/coref_resolution/denominator"]
    same_forward("coreference loss", loss, z["dot/loss_sum"] / counted)
    loss.backward()
    same_gradients("coreference loss", {"z": encodings.grad * counted}, {"z": z["dot/grad_encodings"]})
    assert not encodings.grad[entity == 0].any()

def their_entity_loss(ours, n_counted, n_linked):
    """The public code's loss. It counts linked mentions whose entity was not retrieved as -log(1e-10); we omit them."""
    return (ours * n_counted - np.log(1e-10) * (n_linked - n_counted)) / n_linked

def test_entity_prediction_matches_theirs_except_for_the_loss_of_mentions_that_retrieved_nothing():
    z = golden("entity_prediction")
    scores, classes = z["in/logits"].requires_grad_(), z["in/classes"].long()
    same_forward("entity prediction", attention_weights(scores), z["in/probs"])
    linked = z["in/weights"] > 0
    loss = entity_prediction_loss(scores, classes, torch.where(linked, z["in/targets"], 0).long())
    retrieved = (z["in/targets"][:, None] == classes).any(1) & linked
    assert retrieved.sum() < linked.sum() == z["out/denominator"]
    n = int(retrieved.sum())
    same_forward("entity prediction", their_entity_loss(loss, n, int(linked.sum())),
                 z["out/loss_sum"] / z["out/denominator"])
    loss.backward()
    p, g = z["in/probs"], z["out/grad_probs"]           # the public gradient is with respect to p
    same_gradients("entity prediction", {"scores": scores.grad * n}, {"scores": p * (g - (p * g).sum(1, keepdim=True))})
    answer = predict_entity(scores, classes)[linked]    # the largest sum, not the largest single memory
    assert torch.equal(answer, z["out/predictions_sum"][linked].long())
    assert not torch.equal(answer, z["out/predictions_max"][linked].long())

# ---- The complete models

def heads_state(z, path):
    return {**linear(z, path + "encoder/mention_projector", "projector"),
            **linear(z, path + "encoder/final_query_projector", "query")}

@pytest.mark.parametrize("blocks", [1, 2])
def test_tome_matches_their_hidden_states_retrieval_logits_total_loss_and_every_gradient(blocks):
    z, name = golden(f"tome{blocks}"), f"TOME-{blocks}"
    batch, memory = batch_of(z), memory_of(z, RemovedAfterwards)
    real, targets = z["in/mention_mask"] > 0, z["in/mention_target_weights"] > 0
    linked = batch.entity > 0
    tome = load(new_tome(blocks), tome_state(z, blocks))
    # The public query of eq. 10 is query(projector(.)), but our entity_query is one map. The projector also makes z_m.
    heads = load(torch.nn.ModuleDict({"projector": torch.nn.Linear(64, 16), "query": torch.nn.Linear(16, 8)}),
                 heads_state(z, "param/"))

    H, found = tome(batch.tokens, batch.attention_mask, batch, memory)
    same_forward(name, H[batch.attention_mask], z["out/encoding"][batch.attention_mask])
    for prefix, layer in zip(("", "second_"), found):
        assert torch.equal(layer.ids, z[f"out/{prefix}top_memory_ids"][real].long())
        assert torch.equal(layer.entity, z[f"out/{prefix}top_entity_ids"][real].long())
        assert torch.equal(layer.scores.isneginf(), z[f"out/{prefix}memory_attention_disallowed_mask"][real])
        allowed = ~layer.scores.isneginf()
        scores = z[f"out/{prefix}memory_attention_scores_with_disallowed"][real]
        same_forward(name, layer.scores[allowed], scores[allowed])
        same_forward(name, layer.weights, z[f"out/{prefix}memory_attention_weights"][real])
    encodings = heads.projector(torch.cat([H[batch.row, batch.start], H[batch.row, batch.end]], 1))
    same_forward(name, encodings[linked], z["out/target_mention_encodings"][targets])
    logits = tome.mlm_logits(H, targets_of(z)[0])
    same_forward(name, logits, z["out/mlm_logits"][z["in/mlm_target_weights"] > 0])

    # The public code's final retrieval removes nothing, so ours gets passage -1, from which no row comes.
    answer = memory.retrieve(heads.query(encodings), torch.full_like(batch.passage, -1), 16, 16)
    assert torch.equal(answer.ids[linked], z["out/final_top_memory_ids"][targets].long())
    assert torch.equal(answer.entity[linked], z["out/final_top_entity_ids"][targets].long())
    same_forward(name, answer.scores[linked], z["out/final_memory_attention_scores_with_disallowed"][targets])
    same_forward(name, attention_weights(answer.scores)[linked], z["out/final_memory_attention_weights"][targets])

    losses = {"mlm": (0.85, mlm_loss(logits, targets_of(z)[1])),
              "coref_resolution": (0.1, coreference_loss(encodings, batch.entity, batch.passage))}
    for term, weight, layer in (("el_intermediate", 0.05, found[0]), ("second_el_intermediate", 0.05, found[-1]),
                                ("el_final", 0.15, answer)):
        if blocks == 1 and term.startswith("second"):
            continue
        n = int(((layer.entity == batch.entity[:, None]) & ~layer.scores.isneginf()).any(1)[linked].sum())
        loss = entity_prediction_loss(layer.scores, layer.entity, batch.entity)
        losses[term] = weight, their_entity_loss(loss, n, int(linked.sum()))
    for term, (_, loss) in losses.items():
        same_forward(f"{name} losses", loss, z[f"loss/{term}/loss"] / z[f"loss/{term}/denominator"])
    total = sum(weight * loss for weight, loss in losses.values())
    same_forward(f"{name} losses", total, z["loss/total"])

    total.backward()
    same_gradients(name, gradients(tome) | gradients(heads),
                   tome_state(z, blocks, "grad_param/") | heads_state(z, "grad_param/"))

@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_tome_with_our_removal_rule_differs_from_theirs_only_where_they_lost_places(blocks):
    z = golden(f"tome{blocks}")
    batch, real = batch_of(z), z["in/mention_mask"] > 0
    tome = load(new_tome(blocks), tome_state(z, blocks))
    H, found = tome(batch.tokens, batch.attention_mask, batch, memory_of(z))
    lost = z["out/memory_attention_disallowed_mask"][real]
    queries = z["out/memory_attention_mention_encodings"][real]             # of the first layer, before any difference
    same_forward(f"TOME-{blocks}", tome.blocks[0].memory_attention.query(
        tome.forward_initial(batch.tokens, batch.attention_mask), batch.row, batch.start, batch.end), queries)
    assert found[0].ids.tolist() == top_allowed(z, queries, batch.passage, 8)
    for ids, theirs, gone in zip(found[0].ids, z["out/top_memory_ids"][real], lost):
        assert ids[:int((~gone).sum())].tolist() == theirs[~gone].tolist()
    touched = set(batch.row[lost.any(1)].tolist())
    assert touched and touched < {0, 1, 2}
    for row, mask in enumerate(batch.attention_mask):                       # passages do not see one another
        same = torch.allclose(H[row][mask], z["out/encoding"][row][mask], atol=1e-5)
        assert same == (row not in touched)

@pytest.mark.parametrize("blocks", [1, 2])
def test_both_forward_passes_of_batch_tome_match_the_public_encoder(blocks):
    z, name, case = golden(f"batch_tome{blocks}"), f"BATCH-TOME, {blocks} block" + "s" * (blocks - 1), "disallow_fixed"
    batch = batch_of(z)
    assert batch.unmasked is batch.tokens               # both passes use the masked text, as in the public code
    real, targets = z["in/mention_mask"] > 0, z["in/mention_target_weights"] > 0
    linked = batch.entity > 0

    def span_layers(path):
        e = path + "encoder/"
        return {**linear(z, e + "memory_extraction_layer/key_projector", "key.linear"),
                **linear(z, e + "memory_extraction_layer/value_projector", "value.linear"),
                **linear(z, e + "mention_projector", "coref.linear")}

    def state(path):
        return span_layers(path) | {"tome." + key: value for key, value in tome_state(z, blocks, path).items()}

    model = BatchTOME(new_tome(blocks))
    load(model, state("param/"))
    tome, mask = model.tome, batch.attention_mask
    first, _ = tome(batch.tokens, mask)
    same_forward(name, first[mask], z[f"{case}/final_encoding_first"][mask])
    keys, values = model.encode_mentions(batch.tokens, mask, batch.row[linked], batch.start[linked], batch.end[linked])
    same_forward(name, keys, z[f"{case}/memory_keys"][targets])
    same_forward(name, values, z[f"{case}/memory_values"][targets])

    # The public code keeps masked mentions in the batch memory, so here no mention counts as masked.
    _, _, H, found = model(replace(batch, is_target=torch.zeros_like(batch.is_target)))
    same_forward(name, H[mask], z[f"{case}/encoding"][mask])
    for prefix, layer in zip(("", "second_"), found):
        theirs = z[f"{case}/{prefix}memory_attention_weights"][real]
        same_forward(name, layer.weights, theirs[:, targets])
        assert not theirs[:, ~targets].any()
        assert torch.equal(layer.entity, z[f"{case}/{prefix}top_entity_ids"][real][:, targets].long())
    encodings = model.coref(H, batch.row, batch.start, batch.end)
    same_forward(name, encodings[linked], z[f"{case}/target_mention_encodings"][targets])
    if blocks == 1:
        own = batch.passage[:, None] == batch.passage[linked]
        assert not found[0].weights[own].any()  # The public code's uncorrected "disallow" attends only to `own`:
        assert not z["disallow_as_is/memory_attention_weights"][real][:, targets][~own].any()

        logits = tome.mlm_logits(H, targets_of(z)[0])
        same_forward(name, logits, z[f"{case}/mlm_logits_second"][z["in/mlm_target_weights"] > 0])
        losses = {"mlm": (0.85, mlm_loss(logits, targets_of(z)[1])),
                  "final_coref_resolution": (0.15, coreference_loss(encodings, batch.entity, batch.passage))}
        for term, (_, loss) in losses.items():
            same_forward(f"{name}, losses", loss, z[f"{case}/loss/{term}/loss"] / z[f"{case}/loss/{term}/denominator"])
        total = sum(weight * loss for weight, loss in losses.values())
        same_forward(f"{name}, losses", total, z[f"{case}/loss/total"])
        total.backward()
        # The keys' bias shifts all scores of a mention equally, which the softmax ignores.
        same_gradients(name, gradients(model), state(f"{case}/grad_param/"), zero=["key.linear.bias"])

# ---- Entity markers

@pytest.mark.parametrize("example", [0, 1, 2])
def test_entity_markers_are_where_the_public_code_puts_them(example):
    z = {key.split("/")[-1]: value.numpy() for key, value in golden("entity_markers").items() if f"e{example}/" in key}
    special = {data.E_START: 1, data.E_END: 2, data.CLS: 998, data.SEP: 999}
    n_mentions, n_dropped = 0, 0
    for row, (ids, mask) in enumerate(zip(z["in_text_ids"], z["in_text_mask"])):
        ids = ids[mask > 0]
        here = np.flatnonzero((z["in_mention_mask"] > 0) & (z["in_mention_batch_positions"] == row))
        # Token i is character i. The text fits into one passage. Only our code adds [CLS] and [SEP].
        first, last = (z[f"in_mention_{name}_positions"][here].tolist() for name in ("start", "end"))
        mentions = [data.Mention(a, b + 1, "linked") for a, b in zip(first, last)]
        encoding = SimpleNamespace(ids=ids.tolist(), offsets=[(i, i + 1) for i in range(len(ids))])
        piece, = data.encode_text(encoding, mentions, 100, 100, special, Counter())
        kept = z["out_mention_mask"][here] > 0  # the public code drops mentions beyond new_length; ours cuts the text
        n_mentions, n_dropped = n_mentions + len(here), n_dropped + int((~kept).sum())
        order, tokens = np.argsort(piece.index), np.array(piece.tokens)
        start, end = (np.flatnonzero(tokens == marker)[order] - 1 for marker in (1, 2))
        assert start[kept].tolist() == z["out_mention_start_positions"][here][kept].tolist()
        assert end[kept].tolist() == z["out_mention_end_positions"][here][kept].tolist()
        assert (start[~kept] >= 0).all() and (end[~kept] >= int(z["in_new_length"])).all()
        theirs = z["out_text_ids"][row][z["out_text_mask"][row] > 0]
        reach = int(start[~kept].min()) if not kept.all() else len(theirs)
        assert piece.tokens[1:-1][:reach] == theirs[:reach].tolist()
    assert (n_mentions, n_dropped) == [(3, 0), (4, 1), (5, 0)][example]
