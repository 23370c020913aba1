"""Arguments of TransformerEngine that modules, layers and `checkpoint` take at their defaults, and those that they do."""

import contextlib

import pytest
import torch
from torch.testing import assert_close

import tandem

UNUSED = {
    **dict.fromkeys(("encoder_output", "enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size", "core_attention_bias", "alibi_slopes")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv")),
    "core_attention_bias_type": "no_bias",
    "fast_zero_fill": True,
    "pad_between_seqs": None,
}


class Tracker:
    """As Megatron's: generators by name, and `fork`, in which one of them draws."""

    def __init__(self):
        self.names, self.seed = [], 7

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        self.names.append(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.seed += 1
            yield

    def get_states(self):
        return self.seed

    def set_states(self, states):
        self.seed = states


MAKERS = {
    "Linear": lambda **options: tandem.Linear(8, 8, **options),
    "LayerNormLinear": lambda **options: tandem.LayerNormLinear(8, 8, **options),
    "LayerNormMLP": lambda **options: tandem.LayerNormMLP(8, 8, **options),
    "GroupedLinear": lambda **options: tandem.GroupedLinear(2, 8, 8, **options),
    "MultiheadAttention": lambda **options: tandem.MultiheadAttention(8, 2, **options),
    "TransformerLayer": lambda **options: tandem.TransformerLayer(8, 16, 2, **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_weights_are_drawn_in_the_fork_of_the_tracker(make):
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tracker = Tracker()
        made.append(make(get_rng_state_tracker=lambda tracker=tracker: tracker))
        assert tracker.names and set(tracker.names) == {"model-parallel-rng"}
    for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [MAKERS["Linear"], MAKERS["GroupedLinear"]], ids=["Linear", "GroupedLinear"])
def test_the_fork_has_a_name(make):
    tracker = Tracker()
    make(get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert")
    assert set(tracker.names) == {"expert"}


def test_dropout_of_attention_is_drawn_in_the_fork():
    tracker = Tracker()
    attention = tandem.MultiheadAttention(8, 2, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    x = torch.randn(4, 2, 8)
    tracker.names.clear()
    tracker.seed = 3
    first, second = attention(x), attention(x)
    assert len(tracker.names) == 2 and not torch.equal(first, second)
    tracker.seed = 3
    assert torch.equal(attention(x), first)
    attention.eval()(x)
    assert len(tracker.names) == 3, "nothing is drawn in evaluation"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_sets_generators_back(use_reentrant):
    tracker = Tracker()
    options = {"attention_dropout": 0.5, "get_rng_state_tracker": lambda: tracker}
    attention, x = tandem.MultiheadAttention(8, 2, **options), torch.randn(4, 2, 8)
    results = []
    whole = lambda t: tandem.checkpoint(attention, t, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant)  # noqa: E731
    for call in (attention, whole, lambda t: attention(t, checkpoint_core_attention=True)):
        tracker.seed = 11
        given = x.clone().requires_grad_()
        y = call(given)
        tracker.seed = 50
        y.sum().backward()
        results.append((y.detach(), given.grad))
        assert tracker.seed == 50, "as before backward"
    for result in results[1:]:
        assert_close(result, results[0], atol=0, rtol=0)


def test_what_checkpoint_refuses():
    with pytest.raises(NotImplementedError, match="checkpoint: expected distribute_saved_activations=False, got True. This version knows"):
        tandem.checkpoint(torch.nn.Identity(), torch.ones(1), distribute_saved_activations=True)
    with pytest.raises(ValueError, match="checkpoint: expected use_reentrant to be True or False, got 2. Pass a bool."):
        tandem.checkpoint(torch.nn.Identity(), torch.ones(1), use_reentrant=2)


def test_defaults_are_taken():
    x = torch.randn(3, 2, 8)
    overlaps = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
    made = {"parallel_attention_mlp": False, "ub_tp_comm_overlap": False, "softmax_type": "vanilla", "get_rng_state_tracker": None, **overlaps}
    layer = tandem.TransformerLayer(8, 16, 2, hidden_dropout=0, attention_dropout=0, **made)
    assert torch.equal(layer(x, **UNUSED), layer(x)) and torch.equal(layer(x, None, "no_mask"), layer(x, self_attn_mask_type="no_mask"))
    attention = tandem.MultiheadAttention(8, 2, attention_dropout=0, softmax_type="vanilla", **dict.fromkeys(overlaps, False))
    assert torch.equal(attention(x, None, None, "no_mask"), attention(x, attn_mask_type="no_mask", **UNUSED))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel_attention_mlp": True}, "TransformerLayer: expected parallel_attention_mlp=False, got True."),
        ({"ub_tp_comm_overlap": True}, "TransformerLayer: expected ub_tp_comm_overlap=False, got True."),
        ({"softmax_type": "learnable"}, "MultiheadAttention: expected softmax_type='vanilla', got 'learnable'."),
    ],
)
def test_other_values_are_refused(options, message):
    with pytest.raises(NotImplementedError, match=message):
        tandem.TransformerLayer(8, 16, 2, **options)


@pytest.mark.parametrize("name", UNUSED)
def test_other_values_in_a_call_are_refused(name):
    x = torch.randn(3, 2, 8)
    for module in (tandem.TransformerLayer(8, 16, 2), tandem.MultiheadAttention(8, 2)):
        with pytest.raises(NotImplementedError, match=f"{type(module).__name__}: expected {name}=.*, got 'other'. This version knows the default only."):
            module(x, **{name: "other"})
        with pytest.raises(TypeError, match=f"{type(module).__name__}: expected arguments of its forward, got an unexpected keyword argument 'wrong'."):
            module(x, wrong=1)


ATTRIBUTES = {
    "Linear": {"params_dtype": torch.float32, "name": "n", "weight_names": ("weight",), "bias_names": ("bias",), "apply_bias": True},
    "LayerNormLinear": {"params_dtype": torch.float32, "name": "n", "weight_names": ("weight",), "apply_bias": True},
    "LayerNormMLP": {"params_dtype": torch.float32, "name": "n", "activation_params": None},
    "GroupedLinear": {"params_dtype": torch.float32, "name": "n"},
    "MultiheadAttention": {"num_attention_heads": 2, "num_gqa_groups": 2, "hidden_size_per_attention_head": 4, "hidden_size_kv": 8, "name": "n"},
    "TransformerLayer": {
        "layer_type": "encoder",
        "self_attn_mask_type": "causal",
        "attn_input_format": "sbhd",
        "window_size": None,
        "output_layernorm": False,
        "layer_number": None,
        "name": "n",
    },
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_of_transformer_engine(kind):
    module = MAKERS[kind](name="n")
    for name, value in ATTRIBUTES[kind].items():
        assert getattr(module, name) == value, name
    module.set_tensor_parallel_group(None)


def test_attributes_of_parts_and_activations():
    split = tandem.Linear(8, 8, parameters_split=("a", "b"), return_bias=True)
    assert split.weight_names == ("a_weight", "b_weight") and split.bias_names == ("a_bias", "b_bias") and not split.apply_bias
    assert tandem.LayerNormMLP(8, 8, activation="clamped_swiglu", activation_params={"limit": 2.0}).activation_params == {"limit": 2.0}


def test_norms_are_reset_under_their_older_names():
    made = [tandem.LayerNorm(8), tandem.RMSNorm(8), tandem.LayerNormLinear(8, 8), tandem.LayerNormMLP(8, 8)]
    for module in made:
        weight = module.get_parameter("layer_norm_weight" if hasattr(module, "layer_norm_weight") else "weight")
        with torch.no_grad():
            weight.fill_(5.0)
        (module.reset_rms_norm_parameters if isinstance(module, tandem.RMSNorm) else module.reset_layer_norm_parameters)()
        assert (weight == 1).all()


def test_attributes_of_a_layer_count_at_the_next_call():
    layer, x = tandem.TransformerLayer(8, 16, 2, hidden_dropout=0, attention_dropout=0), torch.randn(3, 2, 8)
    expected = layer(x, self_attn_mask_type="no_mask")
    layer.self_attn_mask_type = "no_mask"
    assert torch.equal(layer(x), expected)
    layer.window_size = (4, 0)
    with pytest.raises(NotImplementedError, match="TransformerLayer: expected window_size .* got \\(4, 0\\). Leave positions out with attention_mask."):
        layer(x)
    layer.window_size, layer.layer_number = None, 2
    cache = tandem.InferenceParams(2, 3)
    with torch.no_grad():
        layer(x, inference_params=cache)
    assert [*cache.key_value_memory_dict] == [2]
    for name, value in (("layer_type", "decoder"), ("output_layernorm", True)):
        with pytest.raises(ValueError, match=f"TransformerLayer: expected {name}=.*, with which it was built, got {value!r}"):
            setattr(layer, name, value)


def test_another_group_must_have_as_many_ranks(one_rank):
    group = torch.distributed.group.WORLD
    layer, x = tandem.TransformerLayer(8, 16, 2, set_parallel_mode=True, tp_group=group, hidden_dropout=0, attention_dropout=0), torch.randn(3, 2, 8)
    expected = layer(x)
    layer.set_tensor_parallel_group(torch.distributed.new_group([0]))
    assert torch.equal(layer(x), expected)

    class Two:
        group_name = "two"

        def size(self):
            return 2

    with pytest.raises((ValueError, TypeError), match="Linear: expected"):
        tandem.Linear(8, 8).set_tensor_parallel_group(Two())


@pytest.mark.parametrize("kind", MAKERS)
def test_another_dtype_than_that_of_the_parameters_is_refused(kind):
    others = ([2, 2],) if kind == "GroupedLinear" else ()
    sizes = (4, 8) if others else (4, 2, 8)
    module, x = MAKERS[kind](params_dtype=torch.bfloat16), torch.randn(sizes)
    with pytest.raises(TypeError, match=r"expected x of dtype torch.bfloat16, that of .*, outside of torch.autocast, got torch.float32. Cast one of them."):
        module(x, *others)
    assert module(x.bfloat16(), *others).dtype == torch.bfloat16
    module.float()
    with pytest.raises(TypeError, match="expected x of dtype torch.float32, that of .*, outside of torch.autocast, got torch.bfloat16."):
        module(x.bfloat16(), *others)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, *others) is not None and module(x.bfloat16(), *others) is not None
    assert module(x, *others).dtype == torch.float32


def test_numbers_of_rows_are_whole():
    with pytest.raises(TypeError, match="GroupedLinear: expected m_splits of whole numbers, got 4.0. Pass the rows of each group."):
        tandem.GroupedLinear(2, 8, 8)(torch.randn(8, 8), [4.0, 4])
