"""Drafters on disk: a z-lab folder (config.json + model.safetensors) that train, eval and export exchange, and our
provenance.json beside it. A lone .safetensors is read with a named preset. Nothing missing is ever guessed."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_train.config import DrafterConfig
from dflash_train.drafter.dflash import DFlashDrafter
from dflash_train.drafter.resolve import check_taps
from dflash_train.drafter.zlab import from_zlab, to_zlab
from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_path, read_json, write_json

CONFIG, WEIGHTS, PROVENANCE, LATEST = "config.json", "model.safetensors", "provenance.json", "latest.json"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a resolved drafter; costs no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DFlashDrafter(config).state_dict().items()}


def check_tensors(shapes: dict[str, tuple[int, ...]], config: DrafterConfig, where: str) -> None:
    """Exactly the drafter's tensors in their shapes. Raises UserError naming what differs."""
    expected = parameter_shapes(config)
    problems = [f"missing {name}" for name in expected if name not in shapes]
    problems += [f"unexpected {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shapes[name])}, not {list(shape)}"
        for name, shape in expected.items() if name in shapes and tuple(shapes[name]) != shape
    ]  # fmt: skip
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        want = f"the {len(expected)} tensors of drafter {config.name}"
        raise UserError(where, got="; ".join(problems[:8]) + more, want=want)


def save_drafter(
    folder: str | Path, weights: nn.Module | dict[str, Tensor], config: DrafterConfig, provenance: dict,
    *, dtype: torch.dtype | None = None,
) -> Path:  # fmt: skip
    """Write a z-lab folder. weights: the model, or its gathered state dict (ZeRO-3). dtype: of the file; null = as is.

    config.json is written last, so a folder that has one is whole. Raises UserError for partial or foreign tensors."""
    folder = Path(folder)
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    check_tensors({name: tuple(tensor.shape) for name, tensor in state.items()}, config, f"drafter to save in {folder}")
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    assert len(dtypes) == 1 and dtypes <= _DTYPES.keys(), f"all tensors in one of {list(_DTYPES)}, got {dtypes}"
    raw = to_zlab(config, _DTYPES[dtypes.pop()])  # refuses before anything is written
    (folder / CONFIG).unlink(missing_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    write_json(folder / PROVENANCE, provenance)
    write_json(folder / CONFIG, raw)
    return folder


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those its index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        return [folder / WEIGHTS]
    names = sorted(set(read_json(index)["weight_map"].values()))
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise UserError(str(index), got=f"file names {foreign}", want="plain names inside the folder")
    return [folder / name for name in names]


def _read_tensors(paths: list[Path]) -> dict[str, Tensor]:
    tensors = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(str(path), got="no such file", want="a drafter's weights") from None
        except SafetensorError as error:
            raise UserError(str(path), got=f"not whole safetensors ({error})", fix="fetch or write it again") from None
    return tensors


def config_from_shapes(shapes: dict[str, tuple[int, ...]], preset: DrafterConfig, where: str) -> DrafterConfig:
    """The preset for a lone weights file, which must be complete and agree with what the shapes do say.

    Shapes give the number of layers, the widths and fc's input; heads, windows, theta, block size, mask token and tap
    ids come from the preset alone. Raises UserError listing what it lacks or where it differs."""
    optional = ("layer_types", "sliding_window", "is_causal")
    missing = [f"drafter.{key}" for key, value in vars(preset).items() if value is None and key not in optional]
    if missing:
        raise UserError(where, got=f"weights without a config.json, and drafter={preset.name} does not say "
                        + ", ".join(missing), want="a preset that names them, or the folder with its config.json",
                        fix="drafter=zlab_qwen3_6_27b, or set the keys")  # fmt: skip
    layers = {int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
    first = "layers.0.self_attn."
    seen = {
        "num_layers": len(layers),
        "hidden_size": shapes.get("norm.weight", (None,))[0],
        "intermediate_size": shapes.get("layers.0.mlp.gate_proj.weight", (None,))[0],
        "head_dim": shapes.get(f"{first}q_norm.weight", (None,))[0],
        "taps * target_hidden_size": shapes.get("fc.weight", (None, None))[1],
    }
    said = {key: getattr(preset, key, None) for key in seen}
    said["taps * target_hidden_size"] = len(preset.target_layer_ids) * preset.target_hidden_size
    wrong = [key for key in seen if seen[key] != said[key]]
    if wrong:
        raise UserError(where, got=", ".join(f"{key}={seen[key]}" for key in wrong),
                        want=f"drafter={preset.name}: " + ", ".join(f"{key}={said[key]}" for key in wrong),
                        fix="choose the preset this file was trained as")  # fmt: skip
    check_tensors(shapes, preset, where)
    preset.check()
    return preset


def load_drafter(
    path: str | Path, preset: DrafterConfig | None = None, *, dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[DFlashDrafter, DrafterConfig]:  # fmt: skip
    """A folder, or a lone .safetensors with a complete preset -> (model, resolved config).

    A config.json in the file's own folder is preferred to the preset. dtype: null = as stored.
    Raises UserError naming missing, unexpected or misshapen tensors and missing config fields."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    own_config = path.is_dir() or (path.name == WEIGHTS and (folder / CONFIG).exists())
    if not path.exists():
        raise UserError(str(path), got="no such file or folder", want="a drafter: a folder or a .safetensors file")
    tensors = _read_tensors(_weight_files(folder) if path.is_dir() else [path])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if own_config:
        config = from_zlab(read_json(folder / CONFIG), folder.name, str(folder / CONFIG))
    elif preset is None:
        raise UserError(str(path), got="weights without a config.json", want="a named preset", fix="drafter=...")
    else:
        config = config_from_shapes(shapes, preset, str(path))
    check_taps(config)
    check_tensors(shapes, config, str(path))
    with torch.device("meta"):
        model = DFlashDrafter(config)
    state = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model, config


def write_latest(run_folder: str | Path, checkpoint: str) -> None:
    """Name the newest complete checkpoint folder (`step-000200`) of a training run, once its files exist."""
    write_json(Path(run_folder, LATEST), {"checkpoint": checkpoint})


def find_checkpoint(path: str | Path | None, checkpoints_dir: str | Path) -> Path:
    """Where a drafter is: a z-lab folder or a .safetensors file.

    path: such a folder or file, a training checkpoint (step-000200), or a training run's folder (its latest one);
    null = the run under checkpoints_dir whose latest.json is newest. Raises UserError."""
    if path is None:
        runs = sorted(Path(checkpoints_dir).glob(f"*/{LATEST}"), key=lambda file: file.stat().st_mtime)
        if not runs:
            raise UserError("checkpoint", got=f"null, and {checkpoints_dir} has no training run",
                            want="a drafter", fix="deepspeed launch/train.py, or name a folder or file")  # fmt: skip
        path = runs[-1].parent
    path = Path(path)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError("checkpoint", got=str(path), want="a folder or a .safetensors file")
        return path
    if not path.is_dir():
        raise UserError("checkpoint", got=f"{path}: no such file or folder", want="a drafter")
    if (path / LATEST).exists():
        path = path / read_json(path / LATEST)["checkpoint"]
    if (path / "drafter" / CONFIG).exists():
        path = path / "drafter"
    if not (path / CONFIG).exists():
        raise UserError("checkpoint", got=f"{path} has no {CONFIG}", want="a drafter's folder, or a training run's")
    return path
