"""State dicts under TransformerEngine's keys, to and fro."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import randomize

import tandem
import tandem.ops as ops


def model():
    return torch.nn.ModuleDict(
        {
            "mlp": ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU(), torch.nn.Linear(8, 8), ops.Linear(8, 8, bias=False)),
            "block": tandem.LayerNormMLP(8, 8),
            "bias": ops.Bias(4),
        }
    )


TENSORS = [
    *["mlp.0.weight", "mlp.1.basic_ops.0.weight", "mlp.1.basic_ops.1.bias", "mlp.3.weight", "mlp.3.bias", "mlp.4.basic_ops.0.weight"],
    *[f"block.{name}" for name in ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")],
    "bias.bias",
]
STATES = ["mlp.0.", "mlp.1.basic_ops.0.", "mlp.1.basic_ops.1.", "mlp.2.", "mlp.4.basic_ops.0.", "block.", "bias."]


def test_the_keys_are_transformer_engines():
    made = randomize(model())
    state = tandem.transformer_engine_state_dict(made)
    assert sorted(state) == sorted([*TENSORS, *[f"{owner}_extra_state" for owner in STATES]])
    assert [*tandem.transformer_engine_state_dict(made, extra_state=False)] == TENSORS
    assert all(state[f"{owner}_extra_state"].numel() == 0 and state[f"{owner}_extra_state"].dtype == torch.uint8 for owner in STATES)
    assert torch.equal(state["mlp.1.basic_ops.0.weight"], made["mlp"][1].weight)
    assert [*tandem.transformer_engine_state_dict(ops.Linear(4, 2), extra_state=False)] == ["basic_ops.0.weight", "basic_ops.1.bias"]


def test_they_load_here():
    source, other = randomize(model()), randomize(model())
    assert str(other.load_state_dict(tandem.transformer_engine_state_dict(source))) == "<All keys matched successfully>"
    assert all(map(torch.equal, source.parameters(), other.parameters()))


def test_scales_stay_here_and_quantized_parameters_are_numbers():
    box = ops.Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
    with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
        box(torch.randn(2, 32))
    assert any("recipe_state" in key for key in box.state_dict())
    keys = ["0.basic_ops.0.weight", "0.basic_ops.1.bias", "1.basic_ops.0.weight", "1.basic_ops.1.bias"]
    assert [*tandem.transformer_engine_state_dict(box, extra_state=False)] == keys
    quantizer = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    box[1].weight = torch.nn.Parameter(tandem.quantize(box[1].weight.detach(), quantizer), requires_grad=False)
    state = tandem.transformer_engine_state_dict(box, extra_state=False)
    assert sorted(state) == keys and torch.equal(state["1.basic_ops.0.weight"], box[1].weight.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_of_both_keys(tmp_path):
    source = randomize(model())
    dcp.save(tandem.transformer_engine_state_dict(source), checkpoint_id=tmp_path / "theirs", no_dist=True)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "ours", no_dist=True)
    for name in ("theirs", "ours"):
        other = randomize(model())
        state = tandem.transformer_engine_state_dict(other, extra_state=False) if name == "theirs" else other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)  # into the module's own tensors
        assert all(map(torch.equal, source.parameters(), other.parameters())), name


@pytest.mark.filterwarnings("ignore")
def test_names_of_tools_that_know_parameters_by_name():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    source, other = randomize(model()["mlp"]), randomize(model()["mlp"])
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state, of_optimizer = get_state_dict(source, optimizer)
    assert [*state] == [name for name, _ in source.named_parameters()]
    set_state_dict(other, torch.optim.AdamW(other.parameters()), model_state_dict=state, optim_state_dict=of_optimizer)
    assert all(map(torch.equal, source.parameters(), other.parameters()))
