"""Weights and caches for a memory: what is chosen by measured losses, made, and decoded within the memory."""

import dataclasses
import json
import sys
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime

import pytest
import torch
from torch.nn.functional import kl_div

from compress import apply
from compress.kv import attached
from compress.kv.attach import Attachment, attached_methods
from compress.linear import sharing_copy
from eval.machine.memory import Peak
from eval.machine.size import size
from eval.record.reading import plain
from eval.record.rows import typed
from eval.record.serving import ServingRound
from eval.run_record import RunInfo, record
from kernels.support.deploy import deployed
from notebooks.study import serving
from notebooks.study.costs import PLAIN
from notebooks.study.service import predict_service, service_of
from reports.page import serving as page
from reports.page.render import page as whole_page
from tests.architectures import tiny_model

CONTEXT, SCORED = 200, 24
WEIGHTS = "8 bits: rtn(bits=8, group_size=32); 3 bits: rtn(bits=3, group_size=32)"
CACHES = "8 bits: kv_int(bits=8, group_size=32); half: snapkv(budget=0.5)"
ASKED = {"memory": "25MB", "context": CONTEXT, "aim": "sequences", "max_kl": 0.0, "weights": WEIGHTS, "caches": CACHES,
         "cost_device": "l4"}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """Of small weights and large caches, 0.8 MB for a context."""
    return tiny_model("llama", max_position_embeddings=512, num_key_value_heads=4, head_dim=128)


@pytest.fixture(scope="module")
def texts():
    return list(torch.randint(96, (3, 1, CONTEXT + SCORED), generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def served(model, texts):
    return made(model, texts)


@pytest.fixture
def quick(monkeypatch):
    """Nothing is decoded."""

    def told(self, chosen):
        return [ServingRound(chosen.batch, chosen.least, chosen.batch * chosen.cache_bytes, 1.0)]

    monkeypatch.setattr(serving._Service, "_decode", told)


def made(model, texts, **changed) -> serving.Serving:
    asked = service_of(**{**ASKED, **changed})
    shapes = predict_service(model, asked)
    return serving.serve(model, [], texts, asked, shapes, corpus="text", new_tokens=2)


def test_the_most_sequences_are_made_and_decoded(model, served):
    found = served
    record, last = found.record, found.record.rounds[-1]
    assert len(record.found) == 9 and {(one.weights, one.cache) for one in record.found} >= {(PLAIN, PLAIN)}
    chosen = record.found[record.kept]
    assert (chosen.weights, chosen.cache) == ("3 bits", "half") and record.tried == 1
    assert chosen.sequences == max(one.sequences for one in record.found)
    assert last.sequences <= chosen.sequences and last.peak_bytes <= record.memory == 25_000_000
    assert last.sequences > 10 and last.tokens_per_s > 0 and not record.broken()
    small = apply("rtn(bits=3, group_size=32)", sharing_copy(model)).model
    assert chosen.weight_bytes == size(deployed(small)).resident_bytes
    assert record.by_shapes.cache_bytes == pytest.approx(last.cache_bytes / last.sequences, rel=0.2), "and room to grow"
    assert [str(one) for one in found.result.recipe] == ["rtn(bits=3, group_size=32)", "snapkv(budget=0.5)"]
    caches = {one.cache: one.cache_bytes for one in record.found}
    metrics = {name: of["cache_bytes"] for name, of in found.scores.metrics.items()}
    assert metrics == {"baseline": caches[PLAIN], "compressed": caches["half"]}, "both behind as many tokens"
    assert str(attached_methods(found.result.model)[0]) == "snapkv(budget=0.5)", "the model keeps its cache"


@torch.no_grad()
def test_losses_are_those_of_tokens_behind_the_context(model, texts, served):
    """By hand: of weights, of a cache that was compressed once, and of both."""
    found = served.record
    whole = {(one.weights, one.cache): one.loss for one in found.found}
    small = apply("rtn(bits=3, group_size=32)", sharing_copy(model)).model

    def logits(of, text, methods):
        with attached(of, methods) as attachment:
            cache = attachment.cache()
            of(text[:, :CONTEXT], past_key_values=cache)
            at = torch.arange(CONTEXT, CONTEXT + SCORED)
            rows = [of(text[:, i : i + 1], past_key_values=cache, position_ids=i[None, None]).logits[0] for i in at]
        return torch.cat(rows).log_softmax(-1)

    def loss(of, methods):
        pairs = [(logits(of, text, methods), logits(model, text, [])) for text in texts]
        each = [kl_div(q, p, log_target=True, reduction="sum") / SCORED for q, p in pairs]
        return float(sum(each) / len(each))

    assert whole[PLAIN, PLAIN] == 0
    assert whole["3 bits", PLAIN] == pytest.approx(loss(small, []), rel=1e-3)
    assert whole[PLAIN, "half"] == pytest.approx(loss(model, "snapkv(budget=0.5)"), rel=1e-3)
    assert whole["3 bits", "half"] == pytest.approx(whole["3 bits", PLAIN] + whole[PLAIN, "half"])
    assert found.divergence == pytest.approx(loss(small, "snapkv(budget=0.5)"), rel=1e-3)
    assert found.divergence_stderr > 0 and (found.windows, found.scored) == (3, SCORED)


def test_a_limit_of_the_divergence_leaves_less_choice(model, texts, served, quick):
    every = {(one.weights, one.cache): one.loss for one in served.record.found}
    limit = every[PLAIN, "8 bits"] * 1.5
    found = made(model, texts, max_kl=limit)
    assert found.record.found[found.record.kept].cache == "8 bits"
    assert found.record.divergence <= limit * 1.02 and not found.record.broken()
    fast = made(model, texts, max_kl=limit, aim="speed").record
    chosen = fast.found[fast.kept]
    within = [one for one in fast.found if one.loss <= limit]
    assert chosen.tokens_per_s == max(one.tokens_per_s for one in within)


def losing(whole):
    """A stand-in of the measurement: `whole` of the sum of the losses of both parts, which alone lose `PARTS`."""

    def loss(self, of, methods):
        weights = next((name for name, one in self.results.items() if one.model is of), "")
        cache = next((name for name, own in self.asked.caches.items() if own == methods), "")
        total = PARTS.get(weights, 0) + PARTS.get(cache, 0)
        return whole(total) if weights and cache else total, None

    return loss


PARTS = {"half": 0.02, "3 bits": 0.02, "8 bits": 0.001}  # losses of weights and of caches by their names


@pytest.mark.parametrize(
    ("limit", "factor", "chosen", "tried"),
    [(0.05, 1.0, ("3 bits", "half"), 1), (0.05, 2.0, ("8 bits", "half"), 2), (0.01, 20.0, (PLAIN, "8 bits"), 2)],
)
def test_a_combination_that_loses_more_than_its_parts_is_not_kept(
    limit, factor, chosen, tried, model, texts, quick, monkeypatch
):
    """Whole models lose the sum of the losses of both parts, times a factor."""
    monkeypatch.setattr(serving._Service, "_loss", losing(lambda total: total * factor))
    record = made(model, texts, max_kl=limit).record
    kept = record.found[record.kept]
    assert record.tried == tried and not record.broken()
    assert (kept.weights, kept.cache) == chosen and record.divergence <= limit
    assert record.factor == pytest.approx(factor), "a combination with a part in 16 bits does not change it"


@pytest.mark.parametrize("mild", [1.0, 30.0])
def test_a_milder_combination_is_made_if_none_is_predicted_within_the_limit(mild, model, texts, quick, monkeypatch):
    """Nothing in 16 bits fits, and the first combination loses 20 times the sum of its parts."""
    combinations = serving._Service._combinations

    def told(self):
        return [dataclasses.replace(one, batch=one.batch * (PLAIN not in (one.weights, one.cache)))
                for one in combinations(self)]  # fmt: skip

    monkeypatch.setattr(serving._Service, "_combinations", told)
    monkeypatch.setattr(serving._Service, "_loss", losing(lambda total: total * (20 if total > 0.01 else mild)))
    record = made(model, texts, max_kl=0.03).record
    chosen = record.found[record.kept]
    assert (chosen.weights, chosen.cache) == ("8 bits", "8 bits") and record.tried == 3
    assert record.divergence == pytest.approx(0.002 * mild) and bool(record.broken()) == (mild > 15)


def test_a_number_of_sequences_may_be_given(model, texts):
    record = made(model, texts, batch=3, caches="").record
    assert [one.sequences for one in record.rounds] == [3] and record.rounds[0].cache_bytes > 3 * 800_000
    assert {one.batch for one in record.found} == {3} and record.found[record.kept].sequences > 3
    assert record.batch == 3 and not record.broken()
    assert "A memory of 25 MB is to hold 3 sequences of 200 tokens, with room for the most" in record.sentences()[0]
    limited = dataclasses.replace(record, max_kl=0.5).sentences()[0]
    assert "room for the most sequences and a divergence of at most 0.5 nats per token. Of 3 combin" in limited
    fewer = dataclasses.replace(record, rounds=(dataclasses.replace(record.rounds[0], sequences=2),), device="here")
    for one, off in ((record, True), (fewer, False)):
        rows = {row.name: row for row in page.context(typed(json.loads(json.dumps(plain({"serving": one})))))["wishes"]}
        last, shapes = one.rounds[-1], one.by_shapes
        assert (rows["sequences"].asked, rows["sequences"].predicted) == ("3", "3")
        assert (rows["sequences"].measured, rows["sequences"].kept) == (f"{last.sequences}", "yes" if off else "no")
        held = shapes.weight_bytes + last.sequences * shapes.cache_bytes + shapes.room
        assert rows[f"memory with {last.sequences} sequences, MB"].predicted == f"{held / 1e6:.1f}"
    assert rows["tokens/s together, here"].measured and not rows["tokens/s together, here"].off
    assert fewer.broken()[0].startswith("The number of sequences is not reached: of 3 that were to decode together, 2")


@pytest.mark.parametrize("each", [1.5, 4.0])
def test_fewer_sequences_are_decoded_if_they_take_more_than_the_memory(each, model, texts, monkeypatch):
    """As if every sequence needed so many times the bytes that were predicted."""

    def together(self, small, methods, count):
        bytes_of_one = round(each * self.caches["half"].nbytes)
        return count * bytes_of_one, count * bytes_of_one, 1.0

    monkeypatch.setattr(serving._Service, "_together", together)
    record = made(model, texts).record
    first, last = record.rounds
    assert first.sequences == record.found[record.kept].batch and first.peak_bytes > record.memory
    room = record.memory - (first.peak_bytes - first.cache_bytes)
    assert last.sequences == room * first.sequences // first.cache_bytes and not record.broken()


def test_what_is_allocated_once_does_not_lower_the_number_of_sequences(model, texts, monkeypatch):
    """As if the first pass left 20 MB in the memory of threads."""
    once = [20_000_000]

    def together(self, small, methods, count):
        held = count * self.caches["half"].nbytes
        return held + (once.pop() if once else 0), held, 1.0

    monkeypatch.setattr(serving._Service, "_together", together)
    record = made(model, texts).record
    assert [one.sequences for one in record.rounds] == [record.found[record.kept].batch] and not record.broken()


@pytest.mark.parametrize("most", [100, 30])
def test_a_number_that_was_lowered_too_far_is_raised_again(model, texts, monkeypatch, most):
    """As if the first two measurements saw 20 MB of something else; more than `most` are really too many."""
    others = [20_000_000] * 2

    def together(self, small, methods, count):
        held = count * self.caches["half"].nbytes
        return held + (others.pop() if others else 0) + (count > most) * 30_000_000, held, 1.0

    monkeypatch.setattr(serving._Service, "_together", together)
    monkeypatch.setattr(serving, "peak_above_start", lambda device: nullcontext(Peak(0)))  # no noise in the prediction
    record = made(model, texts).record
    first, *_, last = record.rounds
    assert last.sequences <= record.found[record.kept].batch and last.peak_bytes <= record.memory
    assert last.sequences > (40 if most == 100 else 20) and len(record.rounds) <= serving.TRIES


@pytest.fixture
def same_peak(monkeypatch):
    """Whatever runs is measured to add 12,345,678 bytes."""

    @contextmanager
    def told(device):
        yield Peak(12_345_678)

    monkeypatch.setattr(serving, "peak_above_start", told)


def test_the_peak_is_that_of_weights_and_of_what_decoding_adds(model, texts, same_peak):
    record = made(model, texts, weights="").record
    kept = record.found[record.kept]
    assert record.rounds[-1].peak_bytes == 12_345_678 + kept.weight_bytes
    assert kept.room == 12_345_678 - kept.cache_bytes


def test_the_page_shows_what_was_asked_predicted_and_measured(served):
    record = dataclasses.replace(served.record, max_kl=100.0)
    shown = page.context(typed(json.loads(json.dumps(plain({"serving": record})))))
    rows = {row.name: row for row in shown["wishes"]}
    memory = rows[f"memory with {record.rounds[-1].sequences} sequences, MB"]
    assert memory.asked == "25.0" and memory.kept == "yes"
    assert rows["divergence, nats per token"].kept == "yes" and rows["sequences"].asked == ""
    assert rows["tokens/s together, l4"].measured == "" and rows["tokens/s together, l4"].predicted
    assert len(shown["found"]) == 9 and sum("chosen" in cells[-1] for cells in shown["found"]) == 1
    assert ("cache", "half", "snapkv(budget=0.5)") in shown["recipes"]
    assert page.context(typed({})) == {} and "A memory of 25 MB is to hold" in repr(served)
    over = dataclasses.replace(record, memory=1_000_000, max_kl=1e-9)
    assert [said.split(":")[0].split(".")[0] for said in over.broken()] == [
        "The limit of the divergence is not kept", "The memory is not kept",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory": ""}, r"`memory` \(=''\) must be a number of bytes, such as 1GB"),
        ({"memory": "much"}, r"`memory` \(='much'\) must be a number of bytes"),
        ({"memory": "600KB"}, r"`memory` \(=600000 bytes\) is too small: one sequence of 200 tokens needs at least"),
        ({"context": 500}, r"`context` \(=500\) and `scored_tokens` \(=24\) need 524 positions; the model has 512"),
        ({"context": 485}, r"`context` \(=485\) and `new_tokens` \(=28\) need 513 positions; the model has 512"),
        ({"batch": -1}, r"`batch` \(=-1\) must be a number of sequences"),
        ({"batch": 500}, r"`batch` \(=500\) does not fit into `memory` \(=25000000 bytes\): at most \d+ sequences of"),
        ({"aim": "price"}, r"`aim` \(='price'\) must be one of sequences, speed"),
        ({"max_kl": -1.0}, r"`max_kl` \(=-1.0\) must be a number above 0"),
        ({"weights": "", "caches": " "}, "`weights` and `caches` are empty"),
        ({"weights": "kv_int"}, r"`weights` \(='kv_int'\) must do without kv_int\(.*\): `caches` takes"),
        ({"caches": "zipvl"}, r"`caches` \(='zipvl'\): what zipvl"),
        ({"caches": "16 bits: kv_fp8"}, "'16 bits' is what the original is called"),
        ({"cost_device": "l40"}, r"`cost_device` \(='l40'\) is not known; did you mean l40s"),
    ],
)
def test_bad_input_is_refused_by_name(changed, message, model):
    with pytest.raises(ValueError, match=message):
        predict_service(model, service_of(**{**ASKED, **changed}), scored_tokens=24, new_tokens=28)


def test_a_model_whose_cache_is_not_known_is_refused_by_the_parameter(model, monkeypatch):
    def work(of, **more):
        raise NotImplementedError("meta")

    monkeypatch.setattr(serving.costs, "work", work)
    with pytest.raises(ValueError, match=r"^`model_name` \(=.*\): a LlamaForCausalLM cannot be run without"):
        predict_service(model, service_of(**ASKED))


def test_impossible_limits_say_how_near_one_can_come(model, texts, quick, same_peak):
    asked = service_of(**{**ASKED, "max_kl": 1e-9})
    shapes = predict_service(model, asked)
    record = serving.serve(model, [], texts, asked, shapes, corpus="text").record
    assert record.found[record.kept].loss == 0, "16 bits, unless they do not fit"
    with pytest.raises(ValueError, match=r"`max_kl` \(=1e-09\) cannot be kept: of the combinations that fit into"):
        tight = dataclasses.replace(asked, memory=int(record.found[0].least) - 1)
        serving.serve(model, [], texts, tight, shapes, corpus="text")


def test_the_original_may_be_the_best_choice(model, texts, quick):
    """Only the cache has recipes, and each of them loses more than the limit."""
    found = made(model, texts, weights="", caches="half: snapkv(budget=0.5)", max_kl=1e-12)
    kept = found.record.found[found.record.kept]
    assert (kept.weights, kept.cache, found.record.divergence) == (PLAIN, PLAIN, 0) and not found.record.broken()
    assert found.result.recipe == [] == attached_methods(found.result.model)
    assert str(found.result).startswith("the original: ")
    info = RunInfo("k", "serve", {}, datetime.now(UTC), "")
    written = record(found.result, found.scores, info, serving=found)
    assert written["recipe"] == [] and written["model"]["weights_sha256"] and len(written["kept"]) > 10
    assert "The choice is weights 16 bits (as they are) and cache 16 bits (as it is)." in whole_page(written)
    here = written | {"serving": written["serving"] | {"device": "here"}}
    for one, said in (
        (written, "No measured speed stands beside it"),
        (here, "by <code>accelerate</code> where it knows the model"),
    ):
        assert said in whole_page(one) and f"({one['serving']['device']}) allow" in whole_page(one)


def test_sequences_have_caches_of_their_own(model, texts):
    """Of as many texts as there are; the others are copies."""
    asked = service_of(**{**ASKED, "batch": 5, "weights": "", "caches": "kv_int"})
    one = serving._Service(model, texts[:2], asked, predict_service(model, asked), {}, 1)
    with attached(model, "kv_int") as attachment:
        for count in (1, 2, 5):
            read = one._read_prompts(model, attachment, count)
            buffers = [layer.slabs[0].k.buffer.data_ptr() for cache, _ in read for layer in cache.filled]
            assert len(read) == count and len(set(buffers)) == 2 * count
            assert len({round(float(cache.filled[1].slabs[0].k.view.sum()), 3) for cache, _ in read}) == min(count, 2)


def test_rounding_in_16_bits_does_not_keep_caches_from_being_attached(model, texts, monkeypatch):
    """They are attached before the model is cast: with 4-bit weights, logits in 16 bits may differ by more."""

    def check(of, *more, **how):
        if of.dtype != torch.float32:
            raise ValueError("rounding")

    monkeypatch.setattr(sys.modules[Attachment.__module__], "check_identity", check)
    record = made(model, texts, batch=2, weights="rtn(bits=4, group_size=32)", caches="kv_int").record
    assert record.rounds[-1].sequences == 2
