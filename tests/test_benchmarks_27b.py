"""The 27B benchmark at toy sizes: what it claims to measure is there, and its comparisons can fail."""

import copy
import json
import sys

import pytest
import torch
from omegaconf import OmegaConf

from dflash_train import cli
from dflash_train.target.qwen3_5 import TreeShape
from dflash_train.util.hf import transformers

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import hybrid_27b
from hybrid_27b import TINY, Run, Sizes, build, hf_config, measure
from hybrid_27b_table import beyond, markdown
from hybrid_agreement import Paths, chain, layer_agreement, model_agreement, random_tree

CPU = torch.device("cpu")
NODES = TINY.agreement_nodes[0]
MODEL, LAYERS = f"model {NODES}", f"layers {NODES}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{dtype: (JSON, table)} of one run in both dtypes."""
    out = tmp_path_factory.mktemp("hybrid_27b")
    assert hybrid_27b.main(["--tiny", "--device", "cpu", "--out", str(out)]) == 0
    read = lambda path: (json.loads(path.read_text()), path.with_suffix(".md").read_text())
    return {path.stem: read(path) for path in out.glob("*.json")}


@pytest.fixture(scope="module")
def target():
    return build(TINY, torch.float32, CPU)[0]


def test_every_part_is_in_the_table_and_nothing_is_beyond_its_bound(made):
    assert set(made) == {"float32", "bfloat16"}
    for record, table in made.values():
        assert record["failed"] == {} and record["beyond"] == []
        for part in ("matrix rate", "random parameters", "capture 2x64", "capture 4x16", "right-padded row",
                     "prefill 80", "KV", "verify chain 4", "verify tree 12", f"{LAYERS}: one GDN layer: ours",
                     f"{LAYERS}: one attention layer: hugging face", f"{MODEL}: control", "captured rows"):  # fmt: skip
            assert part in table, part
        assert len(table) < 11_000


def test_float32_tree_passes_are_rounding_away_from_float64(made):
    figures = made["float32"][0]["figures"]
    for layer in ("GDN layer", "attention layer"):
        assert figures[LAYERS][layer]["ours"]["rms"] < 1e-6
    assert figures[LAYERS]["GDN layer"]["our committed state"]["max"] < 1e-6
    assert figures[MODEL]["logits against float64"]["ours"]["max"] < 1e-4
    assert figures[MODEL]["logits against hugging face"]["ours"]["top1"] == 1.0
    assert all(error["max"] < 1e-5 for error in figures["padding"].values())


def test_bfloat16_tree_passes_round_no_worse_than_hugging_face(made):
    figures = made["bfloat16"][0]["figures"]
    pairs = [figures[LAYERS]["GDN layer"], figures[LAYERS]["attention layer"], figures[MODEL]["logits against float64"],
             *figures[MODEL]["captured rows against float64"].values()]  # fmt: skip
    for errors in pairs:
        assert 1e-4 < errors["hugging face"]["rms"] < 0.2  # it rounds: 0 would mean that nothing was compared
        assert errors["ours"]["rms"] <= 2 * errors["hugging face"]["rms"]


def test_what_sees_the_nodes_in_flat_order_is_far_off(made):
    for record, _ in made.values():
        groups = [*(record["figures"][LAYERS][layer] for layer in ("GDN layer", "attention layer")),
                  record["figures"][MODEL]["logits against float64"]]  # fmt: skip
        controls = [error for group in groups for what, error in group.items() if what.startswith("control")]
        assert len(controls) == 5 and all(error["rms"] > 0.05 for error in controls)


def test_the_run_fails_when_the_tree_op_is_in_flat_order(target, monkeypatch):
    """Trap 26: nothing but the op and the convolution is wrong here, and both comparisons see it."""
    of = TreeShape.of
    tree = random_tree(NODES, TINY.vocab, seed=3)
    prefix = torch.arange(TINY.prefix)
    measured = lambda: beyond({
        LAYERS: layer_agreement(target, TINY.prefix, tree.parents),
        MODEL: model_agreement(target, prefix, tree, TINY.layer_ids, exact=True),
    })  # fmt: skip
    assert measured() == []
    monkeypatch.setattr(TreeShape, "of", staticmethod(lambda parents, width: of(chain(len(parents)), width)))
    found = "\n".join(measured())
    assert f"{LAYERS}: GDN layer: our rms" in found and f"{MODEL}, logits: our rms" in found
    assert "attention layer: our" not in found


def test_a_part_that_fails_is_named_and_the_others_still_run(tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(hybrid_27b, "capture", out_of_memory)
    monkeypatch.setattr(hybrid_27b, "model_agreement", out_of_memory)
    run = measure(TINY, torch.float32, CPU, tmp_path / "run.json")
    reason = "OutOfMemoryError: CUDA out of memory."
    assert run.failed == {"capture 2x64": reason, "capture 4x16": reason, MODEL: reason}
    assert set(run.figures) == {"machine", "build", "padding", "session", LAYERS}
    assert f"| {MODEL} | FAILED: {reason} |" in markdown(run.figures, run.failed)
    assert json.loads((tmp_path / "run.json").read_text())["failed"] == run.failed


@pytest.mark.parametrize("failed, figures, code", [({}, {}, 0), ({"session": "x"}, {}, 1), ({}, "capture 1x1", 1)])
def test_the_exit_code_says_whether_all_is_well(tmp_path, monkeypatch, failed, figures, code):
    run = Run(tmp_path / "run.json")
    empty = {"finite": True, "zero_rows": 7, "tflops": 1, "tokens_per_s": 1, "gflop_per_token": 1, "peak_bytes": 0}
    run.failed, run.figures = failed, {figures: empty} if figures else {}
    monkeypatch.setattr(hybrid_27b, "measure", lambda *_: run)
    assert hybrid_27b.main(["--device", "cpu", "--out", str(tmp_path)]) == code


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("capture 2x64", "finite"), False, "capture 2x64: finite False"),
        (("padding", "layer 1", "cosine"), float("nan"), "layer 1 has cosine nan"),
        (("session", "verify", 0, "finite"), False, "chain 4 has logits that are no numbers"),
        ((LAYERS, "GDN layer", "ours", "rms"), 0.04, "GDN layer: our rms error 0.04"),
        ((LAYERS, "attention layer", "ours", "max"), float("nan"), "attention layer: our max error nan"),
        ((LAYERS, "GDN layer", "control: op in flat order", "rms"), 0.006, "the comparison sees nothing"),
        ((MODEL, "logits against float64", "ours", "rms"), 0.9, "logits: our rms error 0.9"),
        ((MODEL, "captured rows against float64", "layer 6", "ours", "rms"), 0.9, "captured layer 6: our rms"),
    ],
)
def test_a_figure_beyond_its_bound_is_said(made, path, value, message):
    figures = copy.deepcopy(made["bfloat16"][0]["figures"])
    assert beyond(figures) == []
    place = figures
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(message in what for what in beyond(figures)), beyond(figures)


def test_paths_cover_the_tree_and_find_each_node_behind_its_own():
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 4])
    paths = Paths.of(parents)
    assert paths.nodes.tolist() == [[0, 1, 3, 0], [0, 2, 5, 0], [0, 1, 4, 6]] and paths.lengths == [3, 3, 4]
    texts = paths.behind(torch.tensor([70, 71]), torch.arange(7) + 10)
    assert texts[2].tolist() == [70, 71, 10, 11, 14, 16]
    assert paths.pick(texts).tolist() == list(range(10, 17)) and paths.longest() == [0, 1, 4, 6]


def test_the_sizes_are_those_of_qwen3_6_27b():
    """The numbers `plan` has, and the 47.2 GFLOP a token and 51.2 GB a pass that rates are set against."""
    conf = OmegaConf.load(cli.CONF_DIR / "target" / "qwen3_6_27b.yaml")
    config, shape = hf_config(Sizes()), conf.shape
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (
        conf.num_layers, conf.hidden_size, conf.vocab_size)  # fmt: skip
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)  # fmt: skip
    assert config.layer_types.count("linear_attention") == shape.num_linear_layers
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == conf.num_parameters
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert 2 * sum(layers[: max(Sizes().layer_ids) + 1]) / 1e9 == pytest.approx(47.2, abs=0.05)
    assert 2 * (sum(layers) + model.lm_head.weight.numel()) / 1e9 == pytest.approx(51.2, abs=0.05)
