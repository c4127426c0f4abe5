"""The float32 masters behind DeepSpeed's ZeRO stages, parameter by parameter: where this rank's elements lie.

ZeRO flattens and cuts parameters in a way of its own at each stage and world size. Here they are whole again, by name:
read one at a time (`gathered`), written from anything that has them (`put`), and made the weights (`refresh`). Whatever
lies beside a master in the same layout (an Adam moment, an average) is read and written by the same functions.

The only file that knows DeepSpeed's own attributes (0.19.8): BF16_Optimizer (stage 1, bfloat16), DeepSpeedZeroOptimizer
(stage 1 in float32, stage 2) and DeepSpeedZeroOptimizer_Stage3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_train.util import dist

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + count) of a flattened parameter; in this rank's flat tensor number `flat` they lie at
    `offset`."""

    start: int
    count: int
    flat: int
    offset: int

    def of(self, flats: list[Tensor]) -> Tensor:
        return flats[self.flat].detach().narrow(0, self.offset, self.count)


class Masters:
    """flats: this rank's masters as the optimizer steps them. shapes: name -> whole shape, in the module's order."""

    def __init__(self, optimizer, module: nn.Module, device: torch.device):
        self._optimizer, self.device = optimizer, device
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}
        self.is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
        names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        self.flats: list[Tensor] = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))

    def fragment(self, name: str) -> Fragment | None:
        """What this rank holds of a parameter; None where other ranks hold all of it."""
        parameter = self._parameters[name]
        if self.is_stage_3:  # every parameter is cut into equal parts, the last one padded
            flat, offset, count = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            start = count * dist.rank()
            count = min(count, parameter.ds_numel - start)
            return Fragment(start, count, flat, offset) if count > 0 else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        inside, held = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        return Fragment(inside.start, inside.numel, mapping.param_group_index, held.start)

    def gathered(self, name: str, flats: list[Tensor]) -> Tensor:
        """The whole float32 tensor of a parameter, from flat tensors in the masters' layout; a collective, and every
        rank gets it."""
        whole = torch.zeros(torch.Size(self.shapes[name]).numel(), device=self.device)
        fragment = self.fragment(name)
        if fragment is not None:
            whole.narrow(0, fragment.start, fragment.count).copy_(fragment.of(flats))
        if dist.world_size() > 1:  # each element comes from one rank alone: the sum is exact
            torch.distributed.all_reduce(whole)
        return whole.view(self.shapes[name])

    def put(self, name: str, flats: list[Tensor], whole: Tensor) -> None:
        """Write this rank's part of a whole tensor into flat tensors; no collective."""
        fragment = self.fragment(name)
        if fragment is not None:
            fragment.of(flats).copy_(whole.reshape(-1).narrow(0, fragment.start, fragment.count))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the masters the module's weights, as a step does at its end; a collective."""
        if not self.is_stage_3:
            self._optimizer.update_lp_params()
            return
        self._optimizer._partition_all_parameters()
        for number in range(len(self.flats)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        small = self._optimizer.persistent_parameters  # never cut up for long: as many bytes as they are not worth it
        if small:
            small[0].all_gather(small)

    # ------------------------------------------------------------ beside the masters

    def moments(self) -> dict[str, list[Tensor]]:
        """Adam's two moments, in the masters' layout. Before the first step they are made, as zeros."""
        states = [self._state(flat) for flat in self.flats]
        return {key: [state[key] for state in states] for key in MOMENTS}

    def _state(self, flat: Tensor) -> dict:
        base = self._optimizer.optimizer
        state = base.state[flat]
        if not state:  # what torch's AdamW would make at its first step
            fused = bool(base.defaults.get("fused"))
            state["step"] = torch.zeros((), device=flat.device if fused else "cpu")
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat, memory_format=torch.preserve_format, requires_grad=False)
        return state

    @property
    def num_steps(self) -> int:
        """Steps that Adam has taken; skipped ones are not among them."""
        return int(self._state(self.flats[0])["step"])

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        for flat in self.flats:
            self._state(flat)["step"].fill_(count)
