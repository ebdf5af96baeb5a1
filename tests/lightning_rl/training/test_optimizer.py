"""The optimizer follows torch's own, its schedule transformers' formulas, and what cannot be is told at the start."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_rl.training.optimizer import Optimizer, OptimizerConfig, OptimizerRefused, check, lr_factor
from lightning_rl.training.state import from_parts


def config(**changes: Any) -> OptimizerConfig:
    values: dict[str, Any] = {
        "lr": 0.1, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "min_lr_ratio": 0.0, "training_steps": 10,
        "betas": (0.8, 0.9), "weight_decay": 0.05, "grad_clip": 1e9,
    }  # fmt: skip
    return OptimizerConfig(**(values | changes))


def weights(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]


def test_a_folder_that_names_another_class_is_refused() -> None:
    with pytest.raises(ValueError, match="an optimizer state in the checkpoint is a 'Path'"):
        from_parts({"low_bit": "Path", "parts": {}, "about": []})


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def test_steps_are_those_of_torch() -> None:
    ours, theirs = weights(), weights()
    optimizer = Optimizer(ours, config())
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.05, fused=True)
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        assert optimizer.step().keys() == {"grad_norm", "lr"}
        reference.step()
        assert all(parameter.grad is None for parameter in ours)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert optimizer.steps == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": "SGD"}, {"weight_decay": 0.05, "momentum": 0}),
        ({"optimizer": "SGD", "arguments": {"momentum": 0.9}}, {"momentum": 0.9}),
        ({"optimizer": "Adam", "arguments": {"betas": (0.1, 0.2), "eps": 1e-3}}, {"betas": (0.1, 0.2), "eps": 1e-3}),
        ({"optimizer": "Adafactor"}, {"weight_decay": 0.05}),
        ({"optimizer": "RMSprop", "arguments": {"lr": 0.5}}, {"initial_lr": 0.5}),
        (
            {
                "optimizer_impl": "transformers.optimization",
                "optimizer": "Adafactor",
                "arguments": {"relative_step": False},
            },
            {"weight_decay": 0.05, "relative_step": False},
        ),
    ],
)
def test_any_optimizer_gets_the_arguments_that_it_has(changes: Mapping[str, Any], expected: dict[str, Any]) -> None:
    check(config(**changes))
    parameters = weights()
    optimizer = Optimizer(parameters, config(**changes))
    [group] = optimizer.state_dict()["optimizer"]["param_groups"]
    assert {name: group[name] for name in expected} == expected
    give_gradients(parameters, 1)
    optimizer.step()
    assert not torch.equal(parameters[0], weights()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "AdmW"}, r"critic\.optim\.optimizer='AdmW' is no optimizer of torch\.optim, which has .*AdamW"),
        ({"optimizer": "Optimizer"}, "'Optimizer' is no optimizer"),
        ({"optimizer": "LBFGS"}, "'LBFGS' cannot train here: it asks for the loss again"),
        ({"optimizer": "SparseAdam"}, "'SparseAdam' cannot train here: .* sparse gradients"),
        ({"optimizer_impl": "no.such"}, r"optimizer_impl='no\.such' cannot be imported .*; install it"),
        (
            {"arguments": {"momentum": 1}},
            r"override_optimizer_config: torch\.optim\.AdamW has no momentum; it takes lr",
        ),
        ({"arguments": {"params": []}}, "has no params"),
        ({"arguments": {"eps": "small"}}, r"critic\.optim: torch\.optim\.AdamW refuses"),
        ({"betas": (0.9, 1.0)}, "refuses its arguments .*beta"),
        ({"lr_scheduler_type": "polynomial"}, "'polynomial' is unknown; there are constant, linear, cosine"),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_there(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config(section="critic.optim", **changes))


def test_an_optimizer_that_these_parameters_do_not_fit_says_so() -> None:
    check(config(optimizer="Muon"))  # which takes matrices alone
    with pytest.raises(OptimizerRefused, match=r"torch\.optim\.Muon refuses its arguments or parameters \(.*2D"):
        Optimizer(weights(), config(optimizer="Muon"))


def test_frozen_parameters_are_left_out() -> None:
    parameters = weights()
    parameters[0].requires_grad_(False)
    optimizer = Optimizer(parameters, config())
    [group] = optimizer.state_dict()["optimizer"]["param_groups"]
    assert len(group["params"]) == 1
    with pytest.raises(ValueError, match="nothing to train"):
        Optimizer(parameters[:1], config())


def test_a_long_gradient_is_shortened() -> None:
    clipped, scaled = weights(), weights()
    optimizer = Optimizer(clipped, config(optimizer="SGD", grad_clip=0.5, weight_decay=0.0))
    give_gradients(clipped, 1)
    give_gradients(scaled, 1)
    norm = torch.cat([p.grad.flatten() for p in scaled if p.grad is not None]).norm().item()
    assert optimizer.step()["grad_norm"] == pytest.approx(norm)
    for one, other in zip(clipped, scaled, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one, other - 0.1 * other.grad * 0.5 / norm)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_stops_and_leaves_the_weights(wrong: float) -> None:
    parameters = weights()
    optimizer = Optimizer(parameters, config(section="critic.optim"))
    give_gradients(parameters, 1)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 2)
    parameters[1].grad[0] = wrong  # type: ignore[index]
    with pytest.raises(FloatingPointError, match=r"is (nan|inf) after 1 optimizer steps; lower critic\.optim\.lr"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))


def test_a_resumed_optimizer_goes_on_as_if_nothing_had_been() -> None:
    changes: dict[str, Any] = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}
    straight, resumed = weights(), weights()
    first = Optimizer(straight, config(**changes))
    for seed in range(5):
        if seed == 3:
            state = copy.deepcopy(first.state_dict())
            resumed = [nn.Parameter(parameter.detach().clone()) for parameter in straight]
            second = Optimizer(resumed, config(**changes))
            second.load_state_dict(state)
        give_gradients(straight, seed)
        first.step()
        first.schedule_step()
        if seed >= 3:
            give_gradients(resumed, seed)
            second.step()
            second.schedule_step()
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))
    assert second.steps == first.steps == 5


def test_a_resumed_optimizer_has_the_settings_of_now() -> None:
    first = Optimizer(weights(), config(lr=1e-3, lr_warmup_steps=2))
    first.schedule_step()
    parameters = weights()
    second = Optimizer(parameters, config(lr=1e-5, lr_warmup_steps=2, weight_decay=0.5, betas=(0.5, 0.9)))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    give_gradients(parameters, 0)
    assert second.step()["lr"] == pytest.approx(1e-5 * 2 / 3)
    second.schedule_step()
    give_gradients(parameters, 1)
    assert second.step()["lr"] == pytest.approx(1e-5)
    [group] = second._optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.5, (0.5, 0.9), 1e-5)


def test_on_a_cpu_offloading_copies_nothing() -> None:
    parameters = weights()
    optimizer = Optimizer(parameters, config())
    give_gradients(parameters, 1)
    optimizer.step()
    before = optimizer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    optimizer.offload()
    optimizer.onload()
    assert optimizer.state_dict()["optimizer"]["state"][0]["exp_avg"] is before


@pytest.mark.parametrize("before", [False, True])
def test_a_state_goes_on_where_steps_are_computed_in_another_way(before: bool) -> None:
    parameters, theirs = weights(), weights()
    one, alone = Optimizer(parameters, config(arguments={"fused": before})), Optimizer(theirs, config())
    for optimizer, own_parameters in ((one, parameters), (alone, theirs)):
        give_gradients(own_parameters, 1)
        optimizer.step()
    other = Optimizer(parameters, config(arguments={"fused": not before}))
    other.load_state_dict(one.state_dict())
    assert other._optimizer.param_groups[0]["fused"] is not before
    for optimizer, own_parameters in ((other, parameters), (alone, theirs)):
        give_gradients(own_parameters, 2)
        optimizer.step()
    for ours, own in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(ours, own)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_a_state_that_waited_in_main_memory_steps_as_one_that_did_not(fused: bool) -> None:
    stayed, left = ([nn.Parameter(p.detach().cuda()) for p in weights()] for _ in range(2))
    one, other = (Optimizer(parameters, config(arguments={"fused": fused})) for parameters in (stayed, left))
    for seed in range(3):
        other.onload()
        give_gradients(stayed, seed)
        give_gradients(left, seed)
        one.step()
        other.step()
        other.offload()
        assert other.state_dict()["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"
        other.load_state_dict(other.state_dict())  # as a resumed run does, before its first update
        other.offload()
    assert all(torch.equal(first, second) for first, second in zip(stayed, left, strict=True))


@given(
    warmup=st.integers(0, 20), steps=st.integers(1, 60), least=st.floats(0, 1), cycles=st.floats(0.1, 4), data=st.data()
)
def test_line_and_cosine_are_those_of_transformers(
    warmup: int, steps: int, least: float, cycles: float, data: st.DataObject
) -> None:
    step = data.draw(st.integers(warmup, warmup + steps))
    ours = config(lr_warmup_steps=warmup, training_steps=warmup + steps, min_lr_ratio=least, num_cycles=cycles)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine: Any = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        theirs, warmup, warmup + steps, num_cycles=cycles, min_lr_rate=least
    )
    line: Any = transformers.get_linear_schedule_with_warmup(theirs, warmup, warmup + steps)
    assert lr_factor(step, replace(ours, lr_scheduler_type="cosine")) == pytest.approx(
        cosine.lr_lambdas[0](step), abs=1e-9
    )
    assert lr_factor(step, replace(ours, lr_scheduler_type="linear")) == pytest.approx(
        least + (1 - least) * line.lr_lambdas[0](step), abs=1e-9
    )
    assert lr_factor(step, ours) == 1.0


def test_the_learning_rate_warms_up_and_falls() -> None:
    cosine = config(lr_warmup_steps=4, lr_scheduler_type="cosine", min_lr_ratio=0.1, training_steps=24)
    assert [lr_factor(step, cosine) for step in (0, 3, 4, 14, 24, 99)] == pytest.approx([0.2, 0.8, 1, 0.55, 0.1, 0.1])
    linear = config(lr_warmup_steps=4, lr_scheduler_type="linear", min_lr_ratio=0.1, training_steps=24)
    assert [lr_factor(step, linear) for step in (0, 3, 4, 14, 24, 99)] == pytest.approx([0.2, 0.8, 1, 0.55, 0.1, 0.1])
    assert lr_factor(9, linear) > lr_factor(9, config(lr_scheduler_type="linear", min_lr_ratio=0.0, training_steps=24))


def test_the_reported_rate_is_the_one_that_is_used() -> None:
    parameters = weights()
    optimizer = Optimizer(parameters, config(lr_scheduler_type="linear", training_steps=4, optimizer="SGD"))
    seen = []
    for seed in range(4):
        give_gradients(parameters, seed)
        seen.append(optimizer.step()["lr"])
        optimizer.schedule_step()
    assert seen == pytest.approx([0.1, 0.075, 0.05, 0.025])
