"""What eight bits cost: captured rows of a real model on real answers, fp8 as training decodes it against bfloat16.

    python benchmarks/fp8_states.py answers/samples.jsonl.gz --samples 64

Takes samples.jsonl or heldout.jsonl of `regenerate`, plain or gzipped. The model runs in float32; what bfloat16 itself
loses against that stands beside it, as a control.
"""

import argparse
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from dflash_train import cli
from dflash_train.config import ExtractRun
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.records import Sample
from dflash_train.store.fp8 import dequantize, quantize
from dflash_train.target import TARGETS
from dflash_train.target.base import TargetModel, default_layer_ids
from dflash_train.target.files import load_tokenizer
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import code_version


def load_run(target: str) -> ExtractRun:
    cli.register_recipes()
    words = ["data=demo", f"target={target}", "target.dtype=float32", "hardware=cpu", "hardware.num_threads=1"]
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("extract", compose("extract", cli.rewrite_argv(words)))


def read_samples(path: Path) -> Iterator[Sample]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
        yield from (Sample.from_json(json.loads(line)) for line in lines)


def token_rows(path: Path, renderer: Renderer, num_samples: int, max_tokens: int) -> list[list[int]]:
    """Token ids of the first samples that render and fit, evenly over the file's sources."""
    by_source: dict[str, list[list[int]]] = {}
    for sample in read_samples(path):
        try:
            ids = renderer.render(sample).token_ids
        except RenderDrop:
            continue
        if len(ids) <= max_tokens:
            by_source.setdefault(sample.source, []).append(ids)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_source.values()))
    rows = list(itertools.islice((ids for ids in turns if ids is not None), num_samples))
    if not rows:
        raise UserError(str(path), got=f"no sample of at most {max_tokens} tokens", want="answers of regenerate")
    return rows


@torch.inference_mode()
def capture(target: TargetModel, layer_ids: tuple[int, ...], rows: list[list[int]]) -> Tensor:
    """[tokens, L, H] in float32, one sample a forward."""
    hidden = [target.capture(torch.tensor([ids]), layer_ids).hidden[0] for ids in rows]
    return torch.cat(hidden).unflatten(1, (len(layer_ids), -1))


def compare(got: Tensor, want: Tensor) -> dict[str, float]:
    """Rows [n, H] against those they stand for. Errors are parts of a row's largest value, and of its length."""
    got, want = got.double(), want.double()
    error, largest = (got - want).abs(), want.abs().amax(1)
    cosine = torch.cosine_similarity(got, want, dim=1)
    return {"cosine": float(cosine.mean()), "lowest": float(cosine.min()),
            "max_error": float((error.amax(1) / largest).max()),
            "relative": float(((got - want).norm(dim=1) / want.norm(dim=1)).mean())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--target", default="smollm2_135m")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=512)
    options = parser.parse_args()
    run = load_run(options.target)
    module = cli.plugin(TARGETS, run.target.kind, "target.kind")
    prepared = module.prepare(run.target)
    renderer = Renderer(load_tokenizer(prepared.folder, run.target))
    rows = token_rows(options.answers, renderer, options.samples, options.max_tokens)
    layer_ids = default_layer_ids(prepared.spec.num_layers, run.extract.num_taps)
    exact = capture(module.load(run.target, run.hardware), layer_ids, rows)
    assert torch.isfinite(exact).all() and (exact.abs().amax(-1) > 0).all()

    stored = exact.bfloat16()
    codes, scales = quantize(stored.flatten(1), len(layer_ids))
    decoded = dequantize(codes, scales).unflatten(1, (len(layer_ids), -1))
    print(f"commit {code_version()}: {options.target}, {len(rows)} samples, {exact.shape[0]:,} tokens")
    print("| layer | largest value over root mean square, median row | cosine, mean | cosine, lowest row | "
          "largest error / row's largest value | error / row's length, mean | bfloat16 against float32: the same |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    for i, layer_id in enumerate(layer_ids):
        spread = (exact[:, i].abs().amax(1) / exact[:, i].square().mean(1).sqrt()).median()
        eight, sixteen = compare(decoded[:, i], stored[:, i]), compare(stored[:, i], exact[:, i])
        cells = [
            f"{eight['cosine']:.6f}",
            f"{eight['lowest']:.6f}",
            f"{eight['max_error']:.4f}",
            f"{eight['relative']:.4f}",
        ]
        control = f"{sixteen['max_error']:.4f}, {sixteen['relative']:.4f}"
        print(f"| {layer_id} | {spread:.1f} | {' | '.join(cells)} | {control} |")


if __name__ == "__main__":
    main()
