"""A state of all that a state may hold, and what may be done to it between two steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import ucformat
from ucformat.snapshot.source.fingerprint import MANY


class Telling(nn.Linear):
    """Has extra state."""

    told = 0

    def get_extra_state(self) -> object:
        return {"told": self.told}

    def set_extra_state(self, state: object) -> None: ...


class Keeping(torch.optim.Optimizer):
    """Keeps a number and two tensors for each parameter."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, {"rate": rate})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"count": 0, "mean": torch.zeros_like(parameter), "flag": torch.zeros(())}


class Counter:
    def __init__(self) -> None:
        self.count, self.noise = 0, torch.rand(2)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "noise": self.noise}

    def load_state_dict(self, state: object) -> None: ...


class World:
    """A state of all that a state may hold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = nn.Sequential(Telling(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.model = nn.ModuleDict({"a": block, "b": nn.Linear(4, 4), "c": nn.Embedding(4, 4)})
        self.linear("b").weight = nn.Parameter(torch.rand(4, 4).t())
        block.register_buffer("shift", torch.rand(3))
        block.register_buffer("scratch", torch.rand(3), persistent=False)
        block[2].weight = self.model["c"].weight  # tied
        both = torch.rand(2)
        block.register_buffer("left", both)
        block.register_buffer("right", both, persistent=False)
        self.free = nn.Parameter(torch.rand(3))  # of no module
        self.model["twin"] = nn.Linear(4, 4, bias=False)  # in the memory of another, but not the same object
        self.model["twin"].get_parameter("weight").data = self.telling().weight.data
        self.stages = [nn.ModuleDict({"s0": nn.Linear(2, 2)}), nn.ModuleDict({"s1": nn.Linear(2, 2)})]
        self.adam = torch.optim.AdamW([*self.model.parameters(), self.free], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.adam, 2)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.adam.step()
        self.adam.param_groups[0]["tag"] = torch.ones(())
        self.keeping = [Keeping(stage.parameters(), 0.5) for stage in self.stages]
        self.counter = Counter()
        self.memory: np.ndarray[Any, Any] | None = None
        self.state: dict[str, Any] = {
            "optimizer": self.adam,
            "model": self.model,
            "deep": OrderedDict(stages=self.stages, optimizers=self.keeping, depth=2),
            "scheduler": self.scheduler,
            "counter": self.counter,
            "many": {f"t{i}": torch.rand(2) for i in range(MANY)},
            "few": {"x": torch.rand(2), "y": [torch.rand(2), 3]},
            "numbers": {3: torch.rand(1), "array": np.zeros(3), "step": 1},
            "rng": ucformat.rank_local({"torch": torch.get_rng_state(), "n": 1}),
        }

    def linear(self, name: str) -> nn.Linear:
        found = self.model[name]
        assert isinstance(found, nn.Linear)
        return found

    def telling(self) -> Telling:
        found = self.model["a"].get_submodule("0")
        assert isinstance(found, Telling)
        return found

    def parameter(self, random: Random) -> nn.Parameter:
        return random.choice(list(self.model.parameters()))

    def states(self, random: Random) -> dict[Any, Any]:
        """Of one parameter that has any."""
        return random.choice([x for x in self.adam.state.values() if x])


Mutation = Callable[[World, Random], object]
MUTATIONS: list[Mutation] = []


def mutation(act: Mutation) -> Mutation:
    MUTATIONS.append(act)
    return act


@mutation
def swap_data(world: World, random: Random) -> None:
    parameter = world.parameter(random)
    parameter.data = parameter.data.clone()


@mutation
def change_strides(world: World, random: Random) -> None:
    world.linear("b").weight.data = world.linear("b").weight.data.clone(
        memory_format=random.choice([torch.contiguous_format, torch.preserve_format])
    )


@mutation
def transpose(world: World, random: Random) -> None:
    with torch.no_grad():
        world.linear("b").weight.t_()


@mutation
def shift(world: World, random: Random) -> None:
    parameter = world.parameter(random)
    room = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)
    parameter.data = room[1:].view(parameter.shape)


@mutation
def narrow(world: World, random: Random) -> None:
    weight = world.linear("b").weight
    weight.data = torch.zeros(8, 4)[::2]


@mutation
def halve(world: World, random: Random) -> None:
    parameter = world.parameter(random)
    parameter.data = parameter.data.half()


@mutation
def rebase(world: World, random: Random) -> None:
    """A parameter stays where it is, but in another storage than the buffer that lies in its memory."""
    if world.memory is None:
        world.memory = np.zeros(6, dtype=np.float32)
        world.linear("b").bias.data = torch.from_numpy(world.memory)[2:]
        share_buffer(world, random)
    else:
        world.linear("b").bias.data = torch.from_numpy(world.memory[2:])


@mutation
def reinterpret(world: World, random: Random) -> None:
    """The same memory, as numbers of another kind."""
    buffer = world.model["a"].get_buffer("shift")
    buffer.data = buffer.data.view(torch.int32)


@mutation
def shorten(world: World, random: Random) -> None:
    world.linear("b").bias.data = world.linear("b").bias.data[:2]


@mutation
def merge(world: World, random: Random) -> None:
    """Two parameters become one tensor, though not one object."""
    world.linear("b").bias.data = world.telling().bias.data


@mutation
def part(world: World, random: Random) -> None:
    """Two parameters that were one tensor are none any more, since one is seen the other way round."""
    with torch.no_grad():
        world.model["twin"].get_parameter("weight").t_()


def rename_last(items: dict[Any, Any]) -> None:
    """Under another name in the same place."""
    name, item = items.popitem()
    items[f"{name}x"] = item


@mutation
def rename_parameter(world: World, random: Random) -> None:
    rename_last(world.linear("b")._parameters)


@mutation
def rename_buffer(world: World, random: Random) -> None:
    rename_last(world.model["a"].get_submodule("1")._buffers)


@mutation
def rename_last_child(world: World, random: Random) -> None:
    rename_last(world.model._modules)


@mutation
def rename_state(world: World, random: Random) -> None:
    rename_last(world.states(random))


@mutation
def rename_many(world: World, random: Random) -> None:
    rename_last(world.state["many"])


@mutation
def rename_model(world: World, random: Random) -> None:
    world.state = {(f"{key}x" if key == "model" else key): item for key, item in world.state.items()}


@mutation
def persist_the_other(world: World, random: Random) -> None:
    """Of two buffers that are one tensor."""
    world.model["a"]._non_persistent_buffers_set ^= {"left", "right"}


@mutation
def swap_kinds(world: World, random: Random) -> None:
    """What was a number is the tensor now."""
    for states in world.keeping[0].state.values():
        states["count"], states["mean"] = states["mean"], states["count"]


@mutation
def replace_scratch(world: World, random: Random) -> None:
    """No part of the state."""
    world.model["a"].register_buffer("scratch", torch.rand(3), persistent=False)


@mutation
def grow_class(world: World, random: Random) -> None:
    kind = type(world.linear("b"))
    if kind is nn.Linear:
        world.linear("b").__class__ = type("Own", (nn.Linear,), {})
    else:
        kind.get_extra_state = Telling.get_extra_state  # type: ignore[method-assign, assignment]
        kind.told = 3  # type: ignore[attr-defined]


@mutation
def reshape(world: World, random: Random) -> None:
    weight = world.linear("b").weight
    weight.data = weight.data.reshape(2, -1)


@mutation
def negate(world: World, random: Random) -> None:
    """A lazily negated view at the same address, of the same shape, strides and dtype."""
    bias = world.linear("b").bias
    memory = bias.untyped_storage()
    bias.data = torch._neg_view(torch.empty(0).set_(memory, 0, bias.shape, bias.stride()))


@mutation
def reseat(world: World, random: Random) -> None:
    world.linear("b").bias = nn.Parameter(torch.rand(4))


@mutation
def reseat_everywhere(world: World, random: Random) -> None:
    old, new = world.linear("b").bias, nn.Parameter(torch.rand(4))
    world.linear("b").bias = new
    for group in world.adam.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in world.adam.state:
        world.adam.state[new] = world.adam.state.pop(old)


@mutation
def swap_two(world: World, random: Random) -> None:
    """Two parameters of one shape change places; the optimizer's names for them change too."""
    a, b = world.linear("b"), world.telling()
    a.bias, b.bias = b.bias, a.bias


@mutation
def untie(world: World, random: Random) -> None:
    world.model["c"].weight = nn.Parameter(torch.rand(4, 4))


@mutation
def tie(world: World, random: Random) -> None:
    world.model["c"].weight = world.linear("b").weight


@mutation
def add_parameter(world: World, random: Random) -> None:
    world.model["a"].register_parameter("more", random.choice([None, nn.Parameter(torch.rand(2))]))


@mutation
def drop_parameter(world: World, random: Random) -> None:
    world.linear("b").bias = None  # type: ignore[assignment]  # as torch allows


@mutation
def replace_buffer(world: World, random: Random) -> None:
    world.model["a"].shift = torch.rand(random.choice([3, 3, 4]))


@mutation
def drop_buffer(world: World, random: Random) -> None:
    world.model["a"]._buffers.pop("shift", None)


@mutation
def persist_buffer(world: World, random: Random) -> None:
    for name in ("scratch", "shift"):
        world.model["a"]._non_persistent_buffers_set ^= {name}


@mutation
def share_buffer(world: World, random: Random) -> None:
    """The buffer lies in a parameter's memory from now on."""
    world.model["a"].register_buffer("shift", world.linear("b").bias.detach()[:3])


@mutation
def add_child(world: World, random: Random) -> None:
    world.model.add_module(random.choice("xyz"), random.choice([None, nn.Linear(2, 2)]))


@mutation
def rename_child(world: World, random: Random) -> None:
    world.model["d"] = world.model.pop("b") if "b" in world.model else nn.Linear(4, 4)


@mutation
def become_telling(world: World, random: Random) -> None:
    world.linear("b").__class__ = random.choice([Telling, nn.Linear])


@mutation
def patch_saving(world: World, random: Random) -> None:
    def save(held: dict[str, object], prefix: str, keep_vars: bool) -> None:
        held[f"{prefix}other"] = torch.zeros(1)

    world.linear("b")._save_to_state_dict = save  # type: ignore[method-assign, assignment]


@mutation
def tell(world: World, random: Random) -> None:
    world.telling().told += 1


@mutation
def replace_state(world: World, random: Random) -> None:
    states = world.states(random)
    states["exp_avg"] = torch.rand_like(states["exp_avg"])


@mutation
def change_state(world: World, random: Random) -> None:
    world.states(random)["exp_avg"] = random.choice([torch.rand(1), 3, None, [torch.rand(1)], {"x": torch.rand(2)}, "text"])


@mutation
def add_state(world: World, random: Random) -> None:
    world.states(random)[random.choice(["new", "exp_max", 7])] = random.choice([torch.rand(1), 5])


@mutation
def drop_state(world: World, random: Random) -> None:
    world.states(random).pop(random.choice(["step", "exp_avg", "exp_avg_sq"]), None)


@mutation
def forget(world: World, random: Random) -> None:
    world.adam.state.pop(world.parameter(random), None)


@mutation
def foreign_state(world: World, random: Random) -> None:
    world.adam.state[torch.zeros(1)] = {}


@mutation
def order_states(world: World, random: Random) -> None:
    states = world.states(random)
    for name in sorted(states, reverse=True):
        states[name] = states.pop(name)


@mutation
def count(world: World, random: Random) -> None:
    for states in world.keeping[0].state.values():
        states["count"] += 1


@mutation
def move_flag(world: World, random: Random) -> None:
    for states in world.keeping[1].state.values():
        states["flag"] = torch.ones(())


@mutation
def retune(world: World, random: Random) -> None:
    world.adam.param_groups[0][random.choice(["lr", "weight_decay", "note"])] = random.choice([0.5, 2, torch.rand(1)])


@mutation
def split_group(world: World, random: Random) -> None:
    moved = world.adam.param_groups[0]["params"].pop()
    world.adam.param_groups.append({**world.adam.param_groups[0], "params": [moved]})


@mutation
def order_parameters(world: World, random: Random) -> None:
    world.adam.param_groups[-1]["params"].reverse()


@mutation
def name_parameters(world: World, random: Random) -> None:
    for group in world.adam.param_groups:
        group["param_names"] = [f"n{random.random()}" for _ in group["params"]]


@mutation
def disagree(world: World, random: Random) -> None:
    """Optimizers that are one must have equal hyper-parameters."""
    world.keeping[0].param_groups[0]["rate"] = random.choice([0.5, 0.75])


@mutation
def schedule(world: World, random: Random) -> None:
    world.scheduler.step()


@mutation
def advance(world: World, random: Random) -> None:
    world.counter.count += 1
    world.state["numbers"]["step"] = random.choice([2, "text", 3.5])
    world.state["rng"].value["torch"] = torch.get_rng_state()
    world.state["rng"].value["n"] += 1


@mutation
def replace_few(world: World, random: Random) -> None:
    world.state["few"] = {"x": torch.rand(2), "y": [torch.rand(random.choice([2, 3])), 4]}
    world.state["numbers"]["array"] = np.ones(3)


@mutation
def add_entry(world: World, random: Random) -> None:
    where = random.choice([world.state, world.state["few"], world.state["numbers"], world.state["deep"]])
    where["new"] = random.choice([torch.rand(2), 3, nn.Linear(2, 2), [torch.rand(1)], Counter()])


@mutation
def alias_entry(world: World, random: Random) -> None:
    """A tensor of the nest lies in a parameter's memory: the one with the first name counts."""
    world.state["few"]["x"] = random.choice([world.stages[0].get_parameter("s0.bias"), world.linear("b").bias.detach()[:2]])


@mutation
def drop_entry(world: World, random: Random) -> None:
    world.state.pop(random.choice(["few", "numbers", "many", "scheduler", "optimizer"]), None)


@mutation
def refresh_many(world: World, random: Random) -> None:
    world.state["many"] = {key: tensor.detach() for key, tensor in world.state.get("many", {}).items()}


@mutation
def change_many(world: World, random: Random) -> None:
    world.state.get("many", {})["t3"] = random.choice([torch.rand(2), torch.rand(3), 5, world.linear("b").weight])


@mutation
def key_by_number(world: World, random: Random) -> None:
    """Below a key that is no text, tensors leave a mark in the values."""
    world.state["deep"][7] = world.state["deep"].pop("depth", 2)


@mutation
def move_model(world: World, random: Random) -> None:
    world.state["other"] = world.state.pop("model", world.model)


@mutation
def drop_stage(world: World, random: Random) -> None:
    world.state["deep"]["stages"] = list(world.state["deep"]["stages"])[:1]


@mutation
def nest_stage(world: World, random: Random) -> None:
    """A list of modules and others is no model."""
    world.state["deep"]["stages"] = [*world.state["deep"]["stages"], random.choice([nn.Linear(3, 3), 3])]


@mutation
def train(world: World, random: Random) -> None:
    for parameter in world.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    world.adam.step()
