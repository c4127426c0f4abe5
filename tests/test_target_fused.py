"""The fused capture is the library's forward: whole, part by part against its twin, and refused where it cannot run."""

from dataclasses import replace

import pytest
import torch
from helpers_hybrid import DENSE, relative
from helpers_target import random_ids, tiny

from dflash_train.target.fused import FusedCapture, choose, rotate_, why_not
from dflash_train.target.fused_kernels import fla_kernels, naive_kernels, narrow_norm
from dflash_train.target.hf import HFTarget
from dflash_train.util.errors import UserError

LENGTHS = (23, 12, 70)  # over one chunk of 64, too
CPU, LAYERS = torch.device("cpu"), (0, 1, 2)


def batch() -> torch.Tensor:
    """Right-padded rows of LENGTHS; the padding is a real token."""
    ids = torch.full((len(LENGTHS), max(LENGTHS)), 50)
    for i, length in enumerate(LENGTHS):
        ids[i, :length] = random_ids(length, 30 + i)
    return ids


def real(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:length] for row, length in zip(rows, LENGTHS)])


@pytest.mark.parametrize("layer_ids, last_hidden", [((0, 1, 2), True), ((2, 0, 2), False), ((0,), False), ((), True)])
def test_the_fused_forward_is_the_librarys(layer_ids, last_hidden):
    target = tiny(DENSE)
    got = FusedCapture(target.decoder, naive_kernels())(batch(), layer_ids, last_hidden)
    want = target.capture(batch(), layer_ids, last_hidden)
    for part in ("hidden", "last_hidden"):
        ours, theirs = getattr(got, part), getattr(want, part)
        assert (ours is None) == (theirs is None)
        assert ours is None or relative(real(ours), real(theirs)) < 1e-5


@pytest.mark.parametrize("name, broken", [
    ("add_norm", lambda x, delta, gain, eps: naive_kernels().add_norm(x, delta, torch.ones_like(gain), eps)),
    ("conv_silu", lambda x, weight: torch.nn.functional.silu(x)),
    ("delta_rule", lambda q, k, v, gate, beta, *rest: naive_kernels().delta_rule(q, k, v, gate, 0 * beta, *rest)),
    ("gated_norm", lambda x, z, weight, eps: naive_kernels().gated_norm(x, torch.ones_like(z), weight, eps)),
    ("swiglu", lambda gate, up: gate * up),
])  # fmt: skip
def test_a_broken_kernel_would_be_seen(name, broken):
    target = tiny(DENSE)
    got = FusedCapture(target.decoder, replace(naive_kernels(), **{name: broken}))(batch(), LAYERS)
    assert relative(real(got.hidden), real(target.capture(batch(), LAYERS).hidden)) > 0.02


def test_a_target_with_the_fused_path_takes_it_and_leaves_the_model_as_it_was():
    plain = tiny(DENSE)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    fused = HFTarget(plain.files, plain.model, CPU, FusedCapture(plain.decoder, naive_kernels()))
    got, want = fused.capture(batch(), LAYERS), plain.capture(batch(), LAYERS)
    assert not torch.equal(got.hidden, want.hidden)  # another order of sums: it was taken
    assert relative(real(got.hidden), real(want.hidden)) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in plain.model.state_dict().items())


def test_layer_ids_are_checked_on_the_fused_path_too():
    plain = tiny(DENSE)
    fused = HFTarget(plain.files, plain.model, CPU, FusedCapture(plain.decoder, naive_kernels()))
    with pytest.raises(UserError, match=r"extract.layer_ids\n  got:  \[3\]"):
        fused.capture(batch(), (3,))


def test_auto_takes_the_library_where_fused_cannot_run_and_fused_says_why():
    for arch, reason in (("qwen3", "model type qwen3"), ("qwen3_5_moe", "model type"), (DENSE, "device cpu")):
        model = tiny(arch).model
        assert reason in why_not(model, CPU)
        assert choose("auto", model, CPU) is None and choose("library", model, CPU) is None
        with pytest.raises(UserError, match=f"target.kernels\n  got:  fused, with {reason}"):
            choose("fused", model, CPU)


def test_rope_turns_the_first_columns_only():
    x, angle = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 0.3, 2.0])
    cos, sin = (f(angle)[None, :, None].expand(1, 3, 4) for f in (torch.cos, torch.sin))
    turned = x.clone()
    rotate_(turned, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:]) and torch.equal(turned[:, 0], x[:, 0])
    pair = torch.complex(x[..., 0:2], x[..., 2:4]) * torch.polar(torch.ones(3), angle)[None, :, None, None]
    torch.testing.assert_close(turned[..., :4], torch.cat([pair.real, pair.imag], dim=-1))


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_the_norm_of_short_rows_is_the_naive_one_and_leaves_its_input_alone(dtype, limit):
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 5, 3, 32, generator=g).to(dtype)
    x, gain = rows[..., :16], torch.rand(16, generator=g) + 0.5  # a slice, as the queries are
    before = x.clone()
    got, want = narrow_norm(x, gain, 1e-6), naive_kernels().add_norm(x, None, gain, 1e-6)[1]
    assert got.dtype == dtype and relative(got, want) < limit and relative(got, x) > 0.1
    assert torch.equal(x, before) and got.data_ptr() != x.data_ptr() and got.is_contiguous()


# ---------------------------------------------------------------- on a GPU


def inputs(device: str, dtype: torch.dtype) -> dict[str, tuple]:
    """Arguments of every kernel at odd sizes: slices of wider rows, more than one chunk, three value heads a key."""
    g = torch.Generator(device).manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, device=device, dtype=torch.float32).to(dtype)
    heads, length, key, value = 2, 130, 32, 32
    return {
        "add_norm": (draw(3, 7, 640), draw(3, 7, 640), 1 + draw(640).float(), 1e-6),
        "conv_silu": (draw(2, length, 160)[..., 32:96], draw(64, 4)),
        "delta_rule": (draw(2, length, heads, key), draw(2, length, heads, key), draw(2, length, 3 * heads, value),
                       draw(2, length, 3 * heads), draw(2, length, 3 * heads), draw(3 * heads), draw(3 * heads)),
        "gated_norm": (draw(2, length, 6, value), draw(2, length, 6, value), draw(value), 1e-6),
        "swiglu": (draw(5, 9, 96), draw(5, 9, 96)),
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", ["add_norm", "conv_silu", "delta_rule", "gated_norm", "swiglu"])
def test_each_fast_kernel_equals_its_naive_twin(name, dtype, limit):
    arguments = inputs("cuda", dtype)[name]
    got, want = (getattr(kernels(), name)(*arguments) for kernels in (fla_kernels, naive_kernels))
    for ours, theirs in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want))):
        assert ours.dtype == theirs.dtype and relative(ours, theirs) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-2), (torch.bfloat16, 6e-2)])
def test_the_fused_forward_on_a_gpu_is_the_naive_one(dtype, limit):
    decoder = tiny(DENSE, dtype=dtype, device="cuda").decoder
    got, want = (FusedCapture(decoder, make())(batch().cuda(), LAYERS, True) for make in (fla_kernels, naive_kernels))
    for part in ("hidden", "last_hidden"):
        assert relative(real(getattr(got, part)), real(getattr(want, part))) < limit
