"""`benchmarks/objectives.py` at tiny size: the arms differ in nothing but the objective; the peers' is the peers'."""

import json
import sys

import pytest
import torch

from dflash_train import cli
from dflash_train.drafter.dflash import block_hidden
from dflash_train.util.io import read_json, write_json, write_jsonl
from tests.helpers_drafter import FULL, HIDDEN, MASK_ID, VOCAB, packed_batch, tiny_config, tiny_drafter, tiny_head

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import objectives
import objectives_losses
import objectives_measure
import objectives_plan
import objectives_train
import peers_code
from objectives_plan import ARMS, Spec

needs_peers = [
    pytest.mark.peers,
    pytest.mark.skipif(not peers_code.PEERS.is_dir(), reason="the peers' code is not here: `make peers`"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ---------------------------------------------------------------- a whole run


def arguments(work, *more: str, arms: str) -> list[str]:
    data = ["data=mine", f"data.sources.mine.path={work}/prompts.jsonl", f"task=file:{work}/asked.jsonl"]
    return ["--work", str(work), "--size", "tiny", "--arms", arms, *more, "--data", *data]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Everything done for the arms that need no peers."""
    folder = tmp_path_factory.mktemp("objectives")
    words = ["river", "stone", "lamp", "cloud", "paper", "garden", "engine", "violin"]
    pairs = [(a, b) for a in words for b in words if a != b]
    write_jsonl(folder / "prompts.jsonl", ({"prompt": f"say {a}, {b}"} for a, b in pairs))
    write_jsonl(folder / "asked.jsonl", [{"id": name, "turns": [f"what is {name}?"]} for name in ("this", "that")])
    assert objectives.main(arguments(folder, arms="ce_decay,dpace,fp8")) == 0
    return folder


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_samples_in_the_same_order(work):
    """fp8 too, whose shards are others: its store keeps their slices."""
    runs = read_json(work / "objectives.json")["runs"]
    assert len(runs) == 3 * 2 * 2
    by_seed = {seed: [run for name, run in runs.items() if name.endswith(f"seed{seed}")] for seed in (0, 1)}
    for name in ("initial", "samples"):
        first, second = ({run[name] for run in by_seed[seed]} for seed in (0, 1))
        assert len(first) == len(second) == 1 and first != second
    weights = {name: (work / "runs" / name / "drafter/model.safetensors").read_bytes() for name in runs}
    assert len(set(weights.values())) == len(runs)  # and yet all of them learnt something else
    assert {run["blocks"] for run in by_seed[0]} == {by_seed[0][0]["blocks"]} and by_seed[0][0]["blocks"] > 0


def test_the_learning_rate_is_chosen_on_samples_that_compare_nothing(work):
    made = read_json(work / "objectives.json")
    for arm, lr in made["chosen"].items():
        assert made["choosing"][arm][f"{lr:g}"] == max(made["choosing"][arm].values())
        for seed in (0, 1):
            folder = work / "runs" / Spec(arm, lr, seed).name
            choosing, compared = read_json(folder / "run.json")["choose"], read_json(folder / "walk.json")
            assert len(choosing) == 3 and len(compared) == 4 and not choosing.keys() & compared.keys()


def test_the_table_pools_both_seeds_and_leads_by_the_difference(work):
    made = read_json(work / "objectives.json")
    entries = {(e["measure"], e["arm"]): e for e in made["comparison"]}
    assert {measure for measure, _ in entries} == {objectives_measure.WALK, f"file:{work}/asked.jsonl"}
    for (measure, arm), entry in entries.items():
        tokens = rounds = 0
        for seed in (0, 1):
            folder = work / "runs" / Spec(arm, entry["lr"], seed).name
            lists = [*read_json(folder / "walk.json").values()]
            if measure != objectives_measure.WALK:
                lists = [row[3] for row in read_json(folder / "decode.json")["rounds"]]
            tokens, rounds = tokens + sum(map(sum, lists)), rounds + sum(map(len, lists))
        assert rounds == entry["rounds"] > 0 and entry["acceptance"][0] == pytest.approx(tokens / rounds)
        if arm != "ce_decay":
            lead = entries[measure, "ce_decay"]["acceptance"][0] - entry["acceptance"][0]
            assert entry["difference"][0] == pytest.approx(lead)
            assert entry["difference"][1] <= lead <= entry["difference"][2]
    text = (work / "objectives.md").read_text()
    assert text.count("\n| held-out walk (4 prompts) |") == 3 and "not there: nothing" in text


def test_a_finished_run_is_not_trained_again_and_another_experiments_is_refused(work, monkeypatch):
    def fail(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(objectives_train, "train_step", fail)
    assert objectives.main(arguments(work, "--parts", "train,measure", arms="ce_decay,dpace,fp8")) == 0
    with pytest.raises(objectives.UserError, match="steps=4"):
        objectives.main(arguments(work, "--parts", "train", "--steps", "5", arms="ce_decay"))


def test_the_number_of_steps_that_fits_is_found_once_and_kept(work, monkeypatch, capsys):
    monkeypatch.setattr(objectives, "PACE_STEPS", 6)
    asked = ["--work", str(work / "fitted"), *arguments(work, arms="ce_decay")[2:]]
    (work / "fitted").mkdir()
    (work / "fitted/store").symlink_to(work / "store")
    assert objectives.main([*asked, "--parts", "train", "--train-minutes", "0", "--steps", "50"]) == 0
    assert "6 are made" in capsys.readouterr().out  # time for none: the fewest that there can be
    assert read_json(work / "fitted/steps.json")["steps"] == 6
    assert objectives.main([*asked, "--parts", "measure,table", "--train-minutes", "9"]) == 0
    made = read_json(work / "fitted/objectives.json")
    assert made["missing"] == [] and made["plan"]["steps"] == 6


def test_what_would_not_end_in_time_is_not_begun(work, monkeypatch):
    plan, _, _ = objectives.read_plan(arguments(work, arms="ce_decay"))
    done, name = [], "a run"
    do = lambda plan, seconds: done.append(objectives.time.sleep(seconds))
    now = objectives.time.time()
    monkeypatch.setattr(objectives, "LONGEST", {})
    assert objectives.attempt(do, plan, name, 0.2, now + 9)
    assert not objectives.attempt(do, plan, name, 0.0, objectives.time.time() + 0.1) and len(done) == 1
    assert objectives.attempt(do, plan, name, 0.0, objectives.time.time() + 0.9)


def test_a_run_that_fails_or_is_too_late_is_named_and_its_arm_left_out(work, monkeypatch, capsys):
    folder = work / "runs" / Spec("dpace", 1e-3, 1).name
    record = read_json(folder / "run.json")
    (folder / "run.json").unlink()
    try:
        late = ["--parts", "train,table", "--minutes", "0"]
        assert objectives.main(arguments(work, *late, arms="ce_decay,dpace")) == 1
        assert "dpace-lr0.001-seed1: not begun" in capsys.readouterr().out
        monkeypatch.setattr(objectives_train, "train_step", lambda *_: 1 / 0)
        assert objectives.main(arguments(work, "--parts", "train,table", arms="ce_decay,dpace")) == 1
        made = json.loads((work / "objectives.json").read_text())
        assert made["missing"] == ["dpace-lr0.001-seed1"] and list(made["chosen"]) == ["ce_decay"]
    finally:
        write_json(folder / "run.json", record)


def test_the_eight_bit_copy_holds_what_extraction_in_eight_bits_would_hold(work):
    plan = objectives.read_plan(arguments(work, arms="ce_decay,fp8"))[0]
    stores = [objectives_train.open_data(plan, Spec(arm, 1e-3, 0)) for arm in ("ce_decay", "fp8")]
    markers = [objectives_train.list_markers(data.store, "train") for data in stores]
    for wide, narrow in zip(*markers, strict=True):
        assert wide.sample_ids == narrow.sample_ids and wide.lengths == narrow.lengths
        exact, eight = (data.cache.get(marker) for data, marker in zip(stores, (wide, narrow)))
        codes, scales = objectives_train.quantize(exact.hidden, 2)
        assert torch.equal(eight.hidden.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(eight.hidden_scale, scales)


# ---------------------------------------------------------------- whose objective


def peer_setup(num_documents=2, block_size=4):
    """A packed row, the same for all, with prompts of a block's length at least."""
    config = tiny_config((FULL,), block_size=block_size)
    batch = packed_batch([[(20, 6, 20), (17, 5, 15)][:num_documents]], 40)
    run = objectives_plan.tiny_plan(cli.ROOT / "runs", ["data=mine", "data.sources.mine.path=x", "task=none"])
    run = run.train_run(Spec("ce_decay", 1e-3, 0))
    return run, config, tiny_drafter(config), tiny_head(), batch


def through(name: str, seed=3, **changes):
    """(numerator / denominator, gradient of fc, its anchors) by the benchmark's own path."""
    run, config, model, head, batch = peer_setup(**changes)
    objective = objectives_losses.make_objective(ARMS[name], run, config, head)
    torch.manual_seed(seed)
    blocks = objective.draw([], batch)
    numerator, denominator = objective.terms(block_hidden(model, config, head, batch, blocks, "sdpa"), batch, blocks)
    loss = numerator / denominator
    loss.backward()
    return float(loss), model.fc.weight.grad, blocks.anchors[blocks.valid]


class TestPeers:
    pytestmark = needs_peers

    @pytest.mark.parametrize("name, gamma", [("specforge", None), ("specforge_decay", 2.0)])
    def test_specforges_own_model_gives_this_loss_and_gradient_at_anchors_it_draws(self, tmp_path, name, gamma):
        """One document a row, as it trains; its own network with our weights."""
        loss, gradient, anchors = through(name, num_documents=1)
        _, config, model, head, batch = peer_setup(num_documents=1)
        with peers_code.peers():
            from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
            from specforge.modeling.draft.dflash import DFlashDraftModel
        peer = DFlashDraftModel.from_pretrained(exported(tmp_path, config, model, "sglang"), attn_implementation="sdpa",
                                                dtype=torch.float32)  # fmt: skip
        lm_head, embed = torch.nn.Linear(HIDDEN, VOCAB, bias=False), torch.nn.Embedding(VOCAB, HIDDEN)
        lm_head.weight.data, embed.weight.data = head.head, head.embedding
        trainer = OnlineDFlashModel(peer, lm_head, embed, MASK_ID, 4, "sdpa", num_anchors=8, loss_decay_gamma=gamma)
        torch.manual_seed(3)
        theirs, _, _ = trainer(batch.token_ids, batch.hidden, batch.loss_mask.float())
        theirs.backward()
        assert len(anchors) == 8 and loss == pytest.approx(float(theirs), rel=1e-5)
        scale = float(gradient.abs().max())
        torch.testing.assert_close(peer.fc.weight.grad, gradient, atol=2e-4 * scale, rtol=0)

    @pytest.mark.parametrize("name", ["speculators", "speculators_kl"])
    def test_speculators_own_forward_gives_this_loss_and_gradient_at_anchors_it_draws(self, tmp_path, name):
        """Packed documents, which it trains too."""
        loss, gradient, anchors = through(name)
        _, config, model, head, batch = peer_setup()
        with peers_code.peers():
            from speculators.losses import resolve_loss_config
            from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        folder = exported(tmp_path, config, model, "speculators")
        read = DFlashSpeculatorConfig.from_pretrained(folder)
        read.transformer_layer_config._attn_implementation = "eager"
        # With loading info it leaves the verifier's weights alone, which are no folder's here.
        peer, _ = DFlashDraftModel.from_pretrained(folder, config=read, dtype=torch.float32, output_loading_info=True)
        peer.embed_tokens.weight.data, peer.lm_head.weight.data = head.embedding, head.head
        peer.verifier_lm_head.weight.data = head.head
        peer.verifier_norm = torch.nn.Identity()  # the stored last state is after the norm already
        settings = dict(ARMS[name].settings)
        settings["loss_config"] = resolve_loss_config(settings.pop("loss_fn"), "eager")
        torch.manual_seed(3)
        _, theirs, _ = peer.forward(batch.hidden, batch.token_ids, batch.loss_mask.float(), batch.last_hidden,
                                    batch.document_ids, batch.position_ids, max_anchors=8, **settings)  # fmt: skip
        theirs.backward()
        assert len(anchors) == 8 and loss == pytest.approx(float(theirs), rel=1e-5)
        scale = float(gradient.abs().max())
        torch.testing.assert_close(peer.fc.weight.grad, gradient, atol=2e-4 * scale, rtol=0)

    def test_their_arms_train_beside_ours(self, work):
        arms = "ce_decay,specforge,speculators,specforge_decay,speculators_kl"
        assert objectives.main(arguments(work, "--parts", "train,table", arms=arms)) == 0
        runs = read_json(work / "objectives.json")["runs"]
        assert len({run["samples"] for name, run in runs.items() if name.endswith("seed0")}) == 1
        finals = {name: run["losses"][-1][1] for name, run in runs.items() if "lr0.001-seed0" in name}
        assert len(set(finals.values())) == 5 and all(loss > 0 for loss in finals.values())

    def test_a_prompt_shorter_than_a_block_is_refused_where_their_masks_would_leak(self):
        run, config, _, head, _ = peer_setup()
        batch = packed_batch([[(20, 3, 20)]], 40)
        for name in ("specforge", "speculators"):
            objective = objectives_losses.make_objective(ARMS[name], run, config, head)
            with pytest.raises(objectives.UserError, match="shorter than a block"):
                objective.draw([], batch)


def exported(folder, config, model, flavour: str):
    """A folder for the peers' loaders, by the export stage."""
    from dflash_train import export
    from dflash_train.config import ExportConfig, ExportRun, TargetConfig
    from dflash_train.drafter.files import save_drafter

    source = save_drafter(folder / "trained", model, config, {})
    export.main(ExportRun(
        stage="export", run_dir=str(folder), work_dir=str(folder),
        target=TargetConfig(name="tiny", kind="hf", path="some/target"), drafter=config,
        export=ExportConfig(format=flavour, checkpoint=str(source), output_dir=str(folder / flavour), dtype="float32"),
    ))  # fmt: skip
    return folder / flavour


def test_without_the_peers_code_their_arms_say_what_fetches_it(monkeypatch, tmp_path):
    monkeypatch.setattr(peers_code, "PEERS", tmp_path / "none")
    monkeypatch.setattr(peers_code, "find_spec", lambda name: None)  # installed or imported already
    run, config, _, head, _ = peer_setup()
    with pytest.raises(objectives.UserError, match="make peers"):
        objectives_losses.make_objective(ARMS["specforge"], run, config, head)


def test_the_default_arms_are_those_asked_for_and_an_unknown_one_is_refused(tmp_path):
    plan, parts, _ = objectives.read_plan(["--work", str(tmp_path)])
    assert plan.arms == ["ce_decay", "specforge", "speculators", "dpace", "fp8"] and len(plan.specs()) == 20
    assert parts == list(objectives.PARTS) and plan.walk >= 200 and plan.prompts == 32 and len(plan.tasks) == 3
    for size in ("gpu", "cpu"):
        run = objectives.read_plan(["--work", str(tmp_path), "--size", size])[0].train_run(Spec("dpace", 1e-3, 1))
        assert run.train.loss == "dpace" and run.train.seed == 1 and run.train.lr == 1e-3
    for words in (["--arms", "ce_decay,magic"], ["--arms", "dpace"], ["--parts", "cook"]):
        with pytest.raises(objectives.UserError):
            objectives.read_plan(["--work", str(tmp_path), *words])
