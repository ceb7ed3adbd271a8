"""Runs whose every pass is compared with `OneLoss`, and draws of such runs by a number."""

import gc
import math
import random
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import gathered
from tests.support.one_loss import OneLoss
from tests.support.own_mixture import OwnMixtures
from tests.support.ranks import run_ranks
from tests.support.small_runs import RULES
from tests.support.tiny import tiny_tables
from torchmars.checkpoint.state_dict import training_state
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.config.model import MODELS
from torchmars.core.errors import UserError
from torchmars.data.loader import Loader, validation_batches
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import build_run_model
from torchmars.parallel.checks import check_layout
from torchmars.training.build import build_trainer
from torchmars.training.preparation import prepare_data

MODELS["own-mixture"] = f"{OwnMixtures.__module__}.OwnMixtures"
STEPS, MORE = 3, 2  # of the first run, and of the one that goes on from its checkpoint
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = SHAPE | {"name": "llama", "n_kv_head": 4, "n_inner": 48}
EXPERTS = {"n_expert": 8, "n_expert_used": 2, "n_expert_inner": 24}
LATENT = SHAPE | {"name": "deepseek", "n_inner": 48, "q_lora_rank": 24, "kv_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
NO_EXPERTS = {"n_expert": 0, "n_dense": 0, "n_expert_shared": 0, "routed_scaling": 1.0}
FAMILIES = {
    "GPT-2": SHAPE,
    "Llama": LLAMA,
    "Qwen3-MoE": LLAMA | EXPERTS,
    "GLM-4.5": LLAMA | EXPERTS | {"router": "sigmoid", "n_dense": 1, "rotary_fraction": 0.5},
    "DeepSeek": LATENT | EXPERTS | {"router": "sigmoid", "n_dense": 1},
    "DeepSeek, dense": LATENT | NO_EXPERTS | {"router": "softmax"},
    "own mixture": LLAMA | {"name": "own-mixture"},
}


# On the ranks


def observe(cases, fault=None):
    """What this rank sees of the runs of each of `cases`, which are `Drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        return [[watched(tables, each.chunk) for tables in each.runs] for each in cases]


def watched(tables, chunk):
    """Train a run; return what each pass and step had, and what a checkpoint begins and ends as."""
    gc.freeze()  # as tests.support.warm does: the end of the run before has undone it
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, layout, passes = trainer.model, trainer.layout, []
    for part in model.parts.values():
        part.chunk = chunk or part.chunk
    begun, backward, step = whole_state(trainer), model.backward, trainer.train_step

    def noted_backward(batch, *args, ahead=False):
        seen = {"ahead": ahead, "windows": global_batch(layout, batch), "before": whole(model)}
        loss = backward(batch, *args, ahead=ahead)
        gradients = {name: gathered(each.grad) for name, each in model.weights.items()}
        passes.append(seen | {"loss": layout.mean_loss(loss), "gradients": gradients})
        return loss

    def noted_step():
        made = step()
        counts = {name: each.clone() for name, each in model.balance.state().items()}
        norm = trainer.optimizer.grad_norm.item()
        logits = model.attention_logits
        heads = dict(zip(logits.blocks, logits.result().clone(), strict=True))
        told = {"counts": counts, "figures": model.balance.figures() | logits.figures()}
        passes[-1] |= {"norm": norm, "after": whole(model), "heads": heads} | told
        return made

    model.backward, trainer.train_step = noted_backward, noted_step
    trainer.run()
    model.train(False)
    windows = passes[-1]["windows"][:2]
    losses = model.losses(windows)
    return {
        "begun": begun,
        "ended": whole_state(trainer),
        "passes": passes,
        "losses": losses,
        "places": model.sequence.positions(losses.shape[1], losses.device),
        "logits": model.next_logits(windows[:, :-3]),
        "validation": trainer.state.validation_loss,
    }


def whole(model):
    return {name: gathered(each).clone() for name, each in model.tensors.items()}


def whole_state(trainer):
    state = training_state(trainer.layout, trainer.model, trainer.optimizer, {})
    return {name: gathered(each).clone() for name, each in state.items()}


def global_batch(layout, batch):
    """The windows of all ranks that read different ones."""
    own = torch.cat([*batch])
    parts = [torch.empty_like(own) for _ in range(layout.data.size)]
    dist.all_gather(parts, own, group=layout.data.process_group)
    return torch.cat(parts)


# On the process that judges


class Findings:
    """How far a run is from the truth, by what was compared; and what is not as it must be."""

    def __init__(self):
        self.worst, self.own, self.problems, self.tied = defaultdict(float), 0.0, [], False

    def note(self, what, value, most, where=""):
        """Note a difference, which must be at most `most`."""
        value = math.inf if math.isnan(value) else value
        self.worst[what] = max(self.worst[what], value)
        if value > most:
            self.problems.append(f"{what} {value:.1e} > {most:.0e} {where}")

    def __str__(self):
        figures = ", ".join(f"{name} {value:.1e}" for name, value in self.worst.items())
        return f"{figures}; one rank {self.own:.1e}"


def apart(ours, truth, least=0.0):
    """How far a tensor is from the truth, as a part of that; 0 where both are less than `least`."""
    size, difference = truth.double().norm().item(), (ours.double() - truth.double()).norm().item()
    if size <= least:
        return 0.0 if difference <= 100 * least else math.inf
    return difference / size


class NearTie(Exception):
    """Two experts of a token are as good as each other, but for rounding: nothing can be said."""


def judge(runs, ranks):
    """Compare what `ranks` have seen of `runs`, tables of one folder, with the truth."""
    config, found = config_from_tables(runs[0], "in a test"), Findings()
    tokenizer, data = load_tokenizer(config.data.tokenizer), prepare_data(config)
    make = partial(OneLoss, config, tokenizer.vocab_size, tokenizer.end_of_text)
    exact, own, size = make(), make(torch.float32), config.training.global_batch_size
    batch = {"global_batch_size": size, "microbatch_size": size, "rank": 0, "ranks": 1}
    split = partial(data.windows, seq_len=config.training.seq_len)
    loader = Loader(split("train"), seed=config.run.seed, **batch)
    for run, of_ranks in enumerate(zip(*ranks)):
        begun = merged(found, [rank["begun"] for rank in of_ranks])
        if run:  # it goes on from the checkpoint of the one before
            ended = merged(found, [rank[run - 1]["ended"] for rank in ranks])
            same_bits(found, "keys", begun, ended)
        else:
            names = {name: f"model.{name}" for name in exact.initial}
            same_bits(found, "initial weights", {n: begun[names[n]] for n in names}, exact.initial)
        passes = [[*each] for each in zip(*(rank["passes"] for rank in of_ranks), strict=True)]
        try:
            judge_passes(found, exact, own, passes, loader)
        except NearTie:
            found.tied = True
            break
        finally:
            loader.close()
        judge_end(found, exact, of_ranks, split("validation"))
    return found


def judge_passes(found, exact, own, passes, loader):
    """Compare each pass of a run, and each step, of which each rank has seen one."""
    look_ahead, batch = exact.optimizer.exact, None
    for ranks in passes:
        ahead = ranks[0]["ahead"]
        if ahead or not look_ahead:
            batch = loader.step()[0]
        wanted = loader.peek()[0] if ahead else batch
        for each in ranks:
            rows = [sorted(batch.tolist()) for batch in (each["windows"], wanted)]
            found.note("windows", float(rows[0] != rows[1]), 0)
        before = merged(found, [each["before"] for each in ranks])
        gradients = merged(found, [each["gradients"] for each in ranks])
        for each in (exact, own):
            each.take(before)
        loss, truth = exact.backward(wanted, ahead, look_ahead)
        _, of_one = own.backward(wanted, ahead, look_ahead)
        if not ahead:
            judge_counts(found, exact, ranks)
            judge_logits(found, exact, ranks)
        for each in ranks:
            found.note("loss", abs(each["loss"] / loss - 1), 1e-6)
        found.note("gradient", len(gradients.keys() ^ truth.keys()), 0)
        least = 1e-9 * torch.stack([each.norm() for each in truth.values()]).norm().item()
        for name, each in gradients.items():
            one, value = (apart(every, truth[name], least) for every in (of_one[name], each))
            found.note("gradient", value, max(1e-5, 2.5 * one), name)
            found.own = max(found.own, one)
        norm, _ = exact.clip(), own.clip()
        for each in (exact, own):
            each.optimizer.look_ahead() if ahead else each.step()
        if ahead:
            continue
        for each in ranks:
            found.note("norm", abs(each["norm"] / norm - 1), 1e-6)
        after = merged(found, [each["after"] for each in ranks])
        still = {name for name, each in truth.items() if each.norm() <= least}
        judge_ways(found, exact, own, before, after, still)


def judge_counts(found, exact, ranks):
    """Compare how many tokens chose each expert, and what is reported of it."""
    if not exact.found:
        return
    counts = merged(found, [each["counts"] for each in ranks])
    for number, truth in exact.found.items():
        if not torch.equal(counts[f"balance.{number}.counts"], truth.long()):
            if exact.nearest < 1e-5:  # of draw 195 one rank in float32 chooses otherwise too
                raise NearTie
            found.note("counts", 1.0, 0, number)
    choices = torch.stack([*exact.found.values()])
    shares = choices / choices.sum(1, keepdim=True)
    entropy = torch.special.entr(shares).sum(1).mean() / math.log(shares.shape[1])
    busiest, without = shares.max() * shares.shape[1], (choices == 0).sum()
    truth = {"busiest": busiest, "entropy": entropy, "without_tokens": without}
    for name, each in truth.items():
        for rank in ranks:
            found.note("figures", abs(rank["figures"][f"experts/{name}"] - each.item()), 1e-6, name)


def judge_logits(found, exact, ranks):
    """Compare the largest logits of attention, by head, and what is reported of them."""
    heads = merged(found, [each["heads"] for each in ranks])
    told = {number: truth.amax().item() for number, truth in exact.largest.items()}
    for number, truth in exact.largest.items():
        found.note("largest logits", apart(heads[number], truth), 1e-5, number)
        for rank in ranks:
            figure = rank["figures"][f"attention/largest_logit/{number}"]
            found.note("largest logits", abs(figure / told[number] - 1), 1e-5, number)


def judge_ways(found, exact, own, before, after, still):
    """Compare the ways that weights and routers' biases went in a step.

    But for those that are `still`: their gradients are rounding, which rules divide by its size.
    """
    of_one = own.tensors()
    for name, truth in exact.tensors().items():
        if name in still:
            continue
        way, begun = truth.detach() - before[name].double(), before[name].double()
        of_rank, ours = of_one[name].detach().double() - begun, after[name].double() - begun
        least = 1e-7 * begun.norm().item()
        one = apart(of_rank, way, least)
        found.note("way", apart(ours, way, least), max(1e-3, 2.5 * one), name)


def judge_end(found, exact, ranks, validation):
    """Compare what the weights at the end of a run give."""
    exact.take(merged(found, [rank["passes"][-1]["after"] for rank in ranks]))
    windows = ranks[0]["passes"][-1]["windows"][:2]
    losses, logits = exact.losses(windows), exact.next_logits(windows[:, :-3])
    unseen = torch.ones_like(losses, dtype=torch.bool)
    for rank in ranks:
        if rank["losses"].numel():
            unseen[:, rank["places"]] = False
            found.note("tokens", apart(rank["losses"], losses[:, rank["places"]]), 1e-6)
        found.note("logits", apart(rank["logits"], logits), 1e-5)
    found.note("tokens", float(unseen.any()), 0, "of which no rank has the loss")
    every = [windows for windows, _ in validation_batches(validation, [1.0], 4, 4, 0, 1)]
    mean = exact.losses(torch.cat(every)).mean().item()
    found.note("validation", max(abs(rank["validation"] / mean - 1) for rank in ranks), 1e-6)


def merged(found, of_ranks):
    """What all ranks have, by name. Copies must have the same bits."""
    everything = {}
    for tensors in of_ranks:
        for name, each in tensors.items():
            other = everything.setdefault(name, each)
            if other is not each and not torch.equal(other, each):
                found.note("copies", apart(each, other), 0, name)
    return everything


def same_bits(found, what, ours, truth):
    found.note(what, len(ours.keys() ^ truth.keys()), 0)
    for name in ours.keys() & truth.keys():
        found.note(what, float(not torch.equal(ours[name], truth[name])), 0, name)


def judged(cases, fault=None):
    """Train and judge each `Drawn`; those of one number of ranks share a process group."""
    found = {}
    for size in sorted({each.ranks for each in cases}):
        chosen = [place for place, each in enumerate(cases) if each.ranks == size]
        seen = zip(*run_ranks(observe, size, [cases[place] for place in chosen], fault))
        found |= {place: judge(cases[place].runs, ranks) for place, ranks in zip(chosen, seen)}
    return [found[place] for place in range(len(cases))]


# Draws

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DRAWN_RULES = [name for name in RULES if "bfloat16" not in name]


def case(folder, name, model, layouts, rule="mars-adamw", **sections):
    """The tables of two runs of one folder: the second goes on on the second of two layouts."""
    training = {"dtype": "float32", "steps": STEPS + MORE, "seq_len": 64, "global_batch_size": 8}
    training |= sections.pop("training", {})
    stop = [{"stop_after": STEPS}, {}][: len(layouts)]
    return [
        tiny_tables(
            folder,
            run={"name": name, "seed": 1},
            model=model,
            training=training | here,
            parallelism=layout,
            optimizer=RULES[rule],
            schedule={"name": "constant", "warmup_steps": 0},
            checkpoint={"interval": STEPS},
            validation={"interval": STEPS, "windows": 4},
            metrics={"attention": True},
            **sections,
        )
        for layout, here in zip(layouts, stop)
    ]


class Drawn(NamedTuple):
    """Runs of one folder on one number of ranks, and how many tokens a chunk of the loss has."""

    ranks: int
    runs: list[dict[str, dict]]
    chunk: int | None = None


def drawn(folder, number):
    """Draw `number`."""
    at = random.Random(number)
    family, ranks = at.choice([*FAMILIES]), at.choice([2, 2, 2, 3, 4, 4, 4, 4])
    model = drawn_model(at, FAMILIES[family])
    layouts = [drawn_layout(at, ranks, model) for _ in range(2)]
    training = {"z_loss": at.choice([0.0, 1e-2]), "max_grad_norm": at.choice([0.0, 0.05, 1.0])}
    training["qk_clip"] = 0.02 * (at.random() < (0.1 if model.get("qk_norm") else 0.4))
    if model.get("n_expert"):  # a router of one's own need not know them
        losses = {"balance_loss": at.choice([0.0, 0.1]), "router_z_loss": at.choice([0.0, 0.01])}
        training |= losses
    readers = math.lcm(*(dp_of(ranks, each) for each in layouts))
    training["microbatch_size"] = at.choice([1, 1, 2])
    training["global_batch_size"] = readers * training["microbatch_size"] * at.randint(1, 12)
    sections = {
        "training": training,
        "activation_checkpoint": {"mode": at.choice(["none", "full", "selective"])},
        "data": {"separate_documents": at.random() < 0.3},
    }
    if at.random() < 0.3:
        sections["data"]["packing"] = "best_fit"
    if model.get("name") == "llama" and at.random() < 0.2:
        sections["transfer"] = {"n_embd": 16, "depth": at.choice(["none", "1/L"])}
    rule, chunk = at.choice(DRAWN_RULES), at.choice([None, 37, 100])
    return Drawn(ranks, case(folder, f"draw-{number}", model, layouts, rule, **sections), chunk)


def drawn_model(at, model):
    """A family's model, with some of what it can have besides."""
    options = {"tied": at.random() < 0.5, "n_layer": at.choice([2, 4])}
    kind = model.get("name")
    if kind is None:
        options |= {"bias": at.random() < 0.5, "activation": at.choice(["gelu", "gelu_tanh"])}
        del options["tied"]
        options["scale_attn_by_inverse_layer_idx"] = at.random() < 0.3
    elif kind == "deepseek":
        options["q_lora_rank"] = at.choice([0, 24])
        if model["n_expert"] and at.random() < 0.5:
            options |= {"n_group": 4, "topk_group": 2}
    else:
        options |= {"n_kv_head": at.choice([1, 2, 2, 4, 4, 4]), "qkv_bias": at.random() < 0.5}
        options["qk_norm"] = at.random() < 0.4
        options["qk_norm_whole"] = options["qk_norm"] and at.random() < 0.5
        options["post_norms"] = at.random() < 0.3
        options["rope_blocks"] = at.choice(["r", "r", "rn", "ur"])
        if at.random() < 0.4:
            options |= {"window": 20, "window_blocks": at.choice(["s", "sf"])}
        if at.random() < 0.3:
            yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_len": 16}
            options |= yarn
    if model.get("n_expert"):
        options |= {"n_expert_used": at.choice([1, 2, 3]), "n_expert_shared": at.choice([0, 1, 2])}
        options["routed_scaling"] = at.choice([1.0, 2.5])
    return model | options


def drawn_layout(at, ranks, model):
    """A way to share `ranks`, of which each prime factor belongs to an axis."""
    settings = {}
    for factor in {2: [2], 3: [3], 4: at.choice([[2, 2], [2, 2], [4]])}[ranks]:
        axis = at.choice(AXES)
        if axis != "dp_shard":  # it is what remains
            settings[axis] = settings.get(axis, 1) * factor
    inner = ranks // settings.get("pp", 1) // settings.get("dp_replicate", 1)
    if inner > 1 and (model.get("n_expert") or at.random() < 0.05) and at.random() < 0.6:
        settings["ep"] = at.choice([each for each in (2, 3, 4) if inner % each == 0])
    if "pp" in settings:
        settings["pp_schedule"] = at.choice(["GPipe", "1F1B", "Interleaved1F1B"])
    if "cp" in settings:
        settings["cp_method"] = at.choice(["all-gather", "ulysses"])
    settings["accumulate"] = at.choice(["sharded", "sharded", "reduced", "whole"])
    settings["reshard_after_forward"] = at.choice(["auto", "auto", "always", "never"])
    if at.random() < 0.08 + 0.2 * (not {"tp", "pp", "ep"} & settings.keys()):
        settings["reshard_after_forward"] = 2
    settings["cpu_offload"] = at.random() < 0.1
    return settings


def dp_of(ranks, layout):
    """How many ranks read different samples."""
    return ranks // math.prod(layout.get(axis, 1) for axis in ("pp", "cp", "tp"))


def why_not(drawn, number):
    """The settings because of which the ranks cannot share run `number` of a draw: any of them.

    Each is what a message must name. Written by what cannot be, not by what the package refuses.
    """
    tables, found = drawn.runs[number], []
    model, training, layout = tables["model"], tables["training"], tables["parallelism"]
    pp, cp, tp, ep = (layout.get(axis, 1) for axis in ("pp", "cp", "tp", "ep"))
    heads = model["n_head"], model.get("n_kv_head", model["n_head"])
    shards = drawn.ranks // pp // tp // layout.get("dp_replicate", 1)
    if layout["reshard_after_forward"] == 2:  # FSDP2 makes groups of one mesh's ranks
        found += [f"parallelism.{axis}" for axis in ("tp", "pp", "ep") if layout.get(axis, 1) > 1]
        found += ["parallelism.reshard_after_forward = 2 does not divide"] * (shards % 2)
    if training["qk_clip"] and model.get("qk_norm"):
        found.append("model.qk_norm")
    if any(each % tp for each in heads) or 32 % tp:
        found.append("parallelism.tp")
    if ep > 1 and (model.get("n_expert", 8 if "own" in model.get("name", "") else 0) or 1) % ep:
        found.append("parallelism.ep")
    if training["seq_len"] % (tp if cp == 1 else math.lcm(2 * cp, cp * tp)):
        found.append("parallelism.cp")
    if layout.get("cp_method") == "ulysses" and any(each // tp % cp for each in heads):
        found.append("parallelism.cp")
    stages = pp * (2 if layout.get("pp_schedule") == "Interleaved1F1B" else 1)
    of_rank = training["global_batch_size"] // dp_of(drawn.ranks, layout)
    batches = of_rank // training["microbatch_size"]
    if pp > 1 and model["n_layer"] < stages:
        found.append("stages cannot share")
    if pp > 1 and (batches < stages or stages > pp and batches % (batches // pp)):
        found.append("microbatches")
    return found


def refusal(drawn, number):
    """What a user is told of run `number` before ranks start; None: it is trained."""
    try:
        config = config_from_tables(drawn.runs[number], "in a test")
        vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
        model = build_run_model(config, vocab_size)
        check_layout(config, config.parallelism.degrees(drawn.ranks), model)
    except UserError as error:
        return str(error)
    return None
