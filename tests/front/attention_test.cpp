// MultiheadAttention in C++, what it is made of and given: rotary embedding, masks, windows, Linear
// with parts.
#include "tandem/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_attention {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kHidden = 32, kHeads = 4, kLength = 7, kBatch = 2;

MultiheadAttention attention(MultiheadAttentionOptions options = {},
                             at::ScalarType dtype = at::kDouble) {
  options.attention.attention_dropout = 0;
  return randomized(MultiheadAttention(kHidden, kHeads, options, dtype), 0.3);
}

/// As torch computes it.
at::Tensor reference(const MultiheadAttention& made, const at::Tensor& x, const at::Tensor& seen) {
  const auto p = made->named_parameters();
  const auto by_head = [&](const std::string& name) {
    return at::linear(x, p["qkv." + name + "_weight"], p["qkv." + name + "_bias"])
        .unflatten(-1, {kHeads, -1})
        .permute({1, 2, 0, 3});
  };
  const at::Tensor y =
      at::scaled_dot_product_attention(by_head("query"), by_head("key"), by_head("value"), seen);
  return at::linear(y.permute({2, 0, 1, 3}).flatten(-2), p["proj.weight"], p["proj.bias"]);
}

TEST(MultiheadAttention, Masks) {
  MultiheadAttention made = attention();
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble),
                   all = at::ones({kLength, kLength}, at::kBool), causal = all.tril();
  at::Tensor padding = at::zeros({kBatch, 1, 1, kLength}, at::kBool);
  padding.narrow(0, 1, 1).narrow(-1, 5, 2).fill_(true);
  const at::Tensor left = padding.logical_not();
  const std::vector<std::tuple<AttnMaskType, at::Tensor, at::Tensor>> masks = {
      {AttnMaskType::causal, {}, causal},
      {AttnMaskType::no_mask, {}, all},
      {AttnMaskType::causal_bottom_right, {}, causal},
      {AttnMaskType::padding, padding, left.expand({kBatch, 1, kLength, kLength})},
      {AttnMaskType::padding_causal, padding, left & causal},
      {AttnMaskType::arbitrary, causal.logical_not(), causal},
      {AttnMaskType::causal, padding, left & causal},
      {AttnMaskType::causal, at::zeros({kLength}, at::kFloat).masked_fill(padding, -INFINITY),
       left & causal},
      {AttnMaskType::arbitrary, at::ones({kLength}, at::kFloat).masked_fill(padding, -INFINITY),
       left}};
  for (const auto& [type, mask, seen] : masks)
    EXPECT_TRUE(made->forward(x, {.attention_mask = mask, .attn_mask_type = type})
                    .allclose(reference(made, x, seen), 1e-9, 1e-10))
        << static_cast<int>(type);
  EXPECT_TRUE(made->forward(x, {.window_size = Window(-1, 0)}).equal(made->forward(x)));
}

TEST(MultiheadAttention, TheLastOfQueriesAndKeysMayBeAtOnePlace) {
  // Keys of a cache come first: a causal mask from the bottom right sees them all.
  MultiheadAttention made = attention(
      {.attention = {.layer_number = 1, .attn_mask_type = AttnMaskType::causal_bottom_right}});
  const c10::AutoGradMode no_grad(false);
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble);
  InferenceParams cache(kBatch, kLength);
  made->forward(x.narrow(0, 0, 4), {.inference_params = &cache});
  cache.sequence_len_offset = 4;
  EXPECT_TRUE(made->forward(x.narrow(0, 4, 3), {.inference_params = &cache})
                  .allclose(made->forward(x).narrow(0, 4, 3), 1e-9, 1e-10));
}

TEST(MultiheadAttention, ReturnsWhatIsAskedFor) {
  MultiheadAttention made =
      attention({.return_bias = true, .return_layernorm_output = true, .input_layernorm = true});
  const auto p = made->named_parameters();
  EXPECT_THAT(p.keys(), ElementsAre("layernorm_qkv.layer_norm_weight",
                                    "layernorm_qkv.layer_norm_bias", "layernorm_qkv.query_weight",
                                    "layernorm_qkv.key_weight", "layernorm_qkv.value_weight",
                                    "layernorm_qkv.query_bias", "layernorm_qkv.key_bias",
                                    "layernorm_qkv.value_bias", "proj.weight", "proj.bias"));
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble);
  const ModuleOutputs all = made->forward_all(x);
  const at::Tensor normed = at::layer_norm(x, {kHidden}, p["layernorm_qkv.layer_norm_weight"],
                                           p["layernorm_qkv.layer_norm_bias"]);
  EXPECT_TRUE(all.layernorm_output.allclose(normed));
  EXPECT_TRUE(same(all.bias, p["proj.bias"]));
  MultiheadAttention plain = attention();
  {
    const c10::AutoGradMode no_grad(false);
    for (auto& param : plain->named_parameters()) {
      const std::string name = param.key();
      param.value().copy_(p[name.starts_with("qkv") ? "layernorm_" + name : name]);
    }
  }
  EXPECT_TRUE((all.y + all.bias).allclose(plain->forward(normed), 1e-9, 1e-10));
  EXPECT_ERROR(made->forward(x), c10::ValueError, "MultiheadAttention: expected one output, got ",
               "return_bias or return_layernorm_output. Call ");
  EXPECT_FALSE(attention({.return_layernorm_output = true})->forward_all(x).bias.defined())
      << "no norm, none of its outputs";
}

TEST(MultiheadAttention, DropsWeightsInTraining) {
  MultiheadAttention made(kHidden, kHeads);
  const at::Tensor x = random({kLength, kBatch, kHidden});
  EXPECT_FALSE(same(made->forward(x), made->forward(x)));
  made->eval();
  EXPECT_TRUE(same(made->forward(x), made->forward(x)));
}

TEST(MultiheadAttention, OverRanks) {
  const MultiheadAttention made(
      kHidden, kHeads,
      {.attention = {.tensor_parallel = {TensorParallel::Mode::column, "0", 2},
                     .num_gqa_groups = 2}});
  const auto p = made->named_parameters();
  EXPECT_EQ(p["qkv.query_weight"].sizes(), (std::vector<int64_t>{kHidden / 2, kHidden}));
  EXPECT_EQ(p["qkv.key_bias"].sizes(), (std::vector<int64_t>{kHidden / 4}));
  EXPECT_EQ(p["proj.weight"].sizes(), (std::vector<int64_t>{kHidden, kHidden / 2}));
  EXPECT_EQ(p["proj.bias"].sizes(), (std::vector<int64_t>{kHidden}));
  EXPECT_ERROR(
      MultiheadAttention(kHidden, kHeads,
                         {.attention = {.tensor_parallel = {TensorParallel::Mode::column, "0", 4},
                                        .num_gqa_groups = 2}}),
      c10::ValueError,
      "MultiheadAttention: expected num_gqa_groups that 4 ranks share evenly, got 2. Use a "
      "multiple of 4.");
}

TEST(InferenceParams, GradientsAreRightOrAnError) {
  MultiheadAttention made = attention({.attention = {.layer_number = 1}});
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble);
  const auto gradients = [&](const at::Tensor& y) {
    made->zero_grad();
    y.square().sum().backward();
    std::vector<at::Tensor> all;
    for (const at::Tensor& param : made->parameters()) all.push_back(param.grad());
    return all;
  };
  const std::vector<at::Tensor> expected = gradients(made->forward(x));
  InferenceParams cache(kBatch, kLength);
  const std::vector<at::Tensor> actual = gradients(made->forward(x, {.inference_params = &cache}));
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(actual[i].allclose(expected[i], 1e-9, 1e-10)) << i;
  made->forward(x.narrow(0, 0, 4), {.inference_params = &cache});
  cache.sequence_len_offset = 4;
  const at::Tensor later = made->forward(x.narrow(0, 4, 3), {.inference_params = &cache});
  EXPECT_ERROR(
      gradients(later), c10::ValueError,
      "InferenceParams: expected gradients of keys and values of one call, got one of keys and "
      "values that an earlier call has written, whose graph is not kept. Call the layer once for "
      "the whole sequence, or make earlier calls under at::NoGradGuard.");
  const at::Tensor again = made->forward(x.narrow(0, 4, 3), {.inference_params = &cache});
  EXPECT_ERROR(torch::autograd::grad({again.sum()}, {made->parameters()[0]}), c10::ValueError,
               "expected gradients of keys and values of one ");
  cache.sequence_len_offset = 0;
  {
    const at::NoGradGuard constant;
    made->forward(x.narrow(0, 0, 4), {.inference_params = &cache});
  }
  cache.sequence_len_offset = 4;
  gradients(made->forward(x.narrow(0, 4, 3), {.inference_params = &cache}));
  for (const bool swaps : {false, true}) {  // each sequence for itself, until they change places
    for (const int64_t row : {1, 0}) {
      const c10::AutoGradMode records(row == 1);
      cache.sequence_len_offset = 0;
      cache.batch_size_offset = row;
      made->forward(x.narrow(0, 0, 4).narrow(1, row, 1), {.inference_params = &cache});
    }
    if (swaps) cache.swap_key_value_dict(at::tensor({1, 0}));
    cache.sequence_len_offset = 4;
    for (const int64_t row : {0, 1}) {
      cache.batch_size_offset = row;
      const at::Tensor y =
          made->forward(x.narrow(0, 4, 3).narrow(1, row, 1), {.inference_params = &cache});
      if (row == 0 && !swaps)
        gradients(y);
      else
        EXPECT_ERROR(gradients(y), c10::ValueError,
                     "expected gradients of keys and values of one ");
    }
  }
}

TEST(InferenceParams, KnowWhichLayerWrites) {
  const auto numbered = [] { return attention({.attention = {.layer_number = 5}}); };
  MultiheadAttention first = numbered(), second = numbered();
  const at::Tensor x = random({2, 1, kHidden}, at::kDouble);
  InferenceParams cache(1, 4);
  const AttentionArguments arguments{.inference_params = &cache};
  first->forward(x, arguments);
  first->forward(x, arguments);
  EXPECT_ERROR(second->forward(x, arguments), c10::ValueError,
               "InferenceParams: expected the layer that has written keys and values under "
               "layer_number 5 before, got another one. Give each layer a layer_number of its own, "
               "and each model InferenceParams of its own.");
  first = nullptr;
  second->forward(x, arguments);
}

TEST(InferenceParams, ChangeDtypeAndModeBetweenCalls) {
  MultiheadAttention made = attention({.attention = {.layer_number = 1}}, at::kFloat);
  const at::Tensor x = random({4, 1, kHidden});
  InferenceParams cache(1, 4);
  const at::NoGradGuard constant;
  const at::Tensor whole = made->forward(x);
  {
    const c10::InferenceMode inference;
    made->forward(x.narrow(0, 0, 2), {.inference_params = &cache});
  }
  for (auto& [layer, memory] : cache.key_value_memory_dict)
    memory = {memory.first.to(at::kBFloat16), memory.second.to(at::kBFloat16)};
  cache.sequence_len_offset = 2;
  EXPECT_TRUE(made->forward(x.narrow(0, 2, 2), {.inference_params = &cache})
                  .allclose(whole.narrow(0, 2, 2), 0.05, 0.05));
}

TEST(RotaryPositionEmbedding, IsInterpolated) {
  RotaryPositionEmbedding rotary(8, {.rotary_percent = 0.5,
                                     .seq_len_interpolation_factor = 2,
                                     .pretrained_max_position_embeddings = 4});
  const auto last = [&](int64_t length) {
    return rotary->forward(length)[length - 1].flatten()[0].item<float>();
  };
  EXPECT_EQ(last(4), 1.5F);
  EXPECT_EQ(last(8), 3.5F);
  EXPECT_EQ(last(16), 15.F / 4);
  EXPECT_TRUE(same(rotary->forward(4, /*offset=*/8), rotary->forward(12).narrow(0, 8, 4)));
  EXPECT_EQ(RotaryPositionEmbedding(8, {.seq_len_interpolation_factor = 2})
                ->forward(9)[8]
                .flatten()[0]
                .item<float>(),
            8);
  EXPECT_EQ(rotary->forward(4).sizes(), (std::vector<int64_t>{4, 1, 1, 4}));
  const at::Tensor x = random({4, 1, 2, 8});
  EXPECT_TRUE(
      same(apply_rotary_pos_emb(x, rotary->forward(4)).narrow(-1, 4, 4), x.narrow(-1, 4, 4)));
  rotary->to(at::kBFloat16);
  EXPECT_EQ(rotary->forward(4).scalar_type(), at::kFloat);
  EXPECT_EQ(apply_rotary_pos_emb(x.to(at::kBFloat16), rotary->forward(4)).scalar_type(),
            at::kBFloat16);
  EXPECT_TRUE(rotary->named_buffers().is_empty()) << "in no checkpoint";
}

TEST(RotaryPositionEmbedding, EachHasAngles) {
  MultiheadAttention made = attention();
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble),
                   angles = RotaryPositionEmbedding(kHidden / kHeads)->forward(kLength);
  const at::Tensor both = made->forward(x, {.rotary_pos_emb = angles});
  EXPECT_TRUE(same(made->forward(x, {.rotary_pos_emb = {angles, angles}}), both));
  EXPECT_FALSE(same(made->forward(x, {.rotary_pos_emb = {angles, angles * 2}}), both));
}

TEST(Linear, HasPartsAndABiasOfItsOwn) {
  Linear linear = randomized(
      Linear(8, 12, {.return_bias = true, .parameters_split = {{"gate", 8}, {"up", 4}}}));
  EXPECT_THAT(names_of(*linear), ElementsAre("gate_weight", "up_weight", "gate_bias", "up_bias"));
  const auto p = linear->named_parameters();
  const at::Tensor x = random({5, 8});
  const ModuleOutputs all = linear->forward_all(x);
  EXPECT_TRUE(
      near(all.y.detach(), at::linear(x, at::cat({p["gate_weight"], p["up_weight"]})).detach()));
  EXPECT_TRUE(same(all.bias, at::cat({p["gate_bias"], p["up_bias"]})));
  Linear plain = randomized(Linear(8, 12));
  const auto q = plain->named_parameters();
  EXPECT_TRUE(near(plain->forward(x).detach(), at::linear(x, q["weight"], q["bias"]).detach()));
  Linear drawn(64, 256, {.bias = false});
  EXPECT_NEAR(drawn->parameters()[0].std().item<double>(), 0.023, 0.001);
}

TEST(Linear, OverRanksTheBiasComesLast) {
  Linear row(8, 12, {.tensor_parallel = {TensorParallel::Mode::row, "0", 2}});
  const auto p = row->named_parameters();
  EXPECT_EQ(p["weight"].sizes(), (std::vector<int64_t>{12, 4}));
  EXPECT_EQ(p["bias"].sizes(), (std::vector<int64_t>{12}));
}

TEST(AttentionErrors, TellWhatIsExpected) {
  EXPECT_ERROR(attention({.attention = {.num_gqa_groups = 3}}), c10::ValueError,
               "MultiheadAttention: expected num_gqa_groups that divides the 4 attention heads, "
               "got 3. Use a divisor.");
  EXPECT_ERROR(MultiheadAttention(30, 4), c10::ValueError,
               "MultiheadAttention: expected hidden_size that 4 heads share evenly, got 30. Give "
               "kv_channels.");
  EXPECT_ERROR(attention({.attention = {.window_size = Window(4, 0)}}), c10::NotImplementedError,
               "MultiheadAttention: expected window_size (-1, 0) or None, got (4, 0). Leave "
               "positions out with attention_mask.");
  EXPECT_ERROR(
      RotaryPositionEmbedding(7), c10::ValueError,
      "RotaryPositionEmbedding: expected an even number of features to rotate, up to dim, got 7.");
  EXPECT_ERROR(RotaryPositionEmbedding(8, {.seq_len_interpolation_factor = 0}), c10::ValueError,
               "RotaryPositionEmbedding: expected seq_len_interpolation_factor > 0, got 0. Leave "
               "it out where positions are not divided.");
  EXPECT_ERROR(InferenceParams(0, 4), c10::ValueError,
               "InferenceParams: expected max_batch_size > 0, got 0");
  const at::Tensor x = random({2, 1, kHidden}, at::kDouble);
  InferenceParams cache(1, 4);
  EXPECT_ERROR(attention()->forward(x, {.inference_params = &cache}), c10::ValueError,
               "MultiheadAttention: expected layer_number where inference_params are given, got "
               "None. Build each layer with its own.");
  EXPECT_ERROR(attention()->forward(x, {.attn_mask_type = AttnMaskType::padding}), c10::ValueError,
               "MultiheadAttention: expected an attention_mask with the mask type 'padding', got "
               "none. True in it leaves a position out.");
  const auto masked = [&](const at::Tensor& mask, AttnMaskType type) {
    attention()->forward(x, {.attention_mask = mask, .attn_mask_type = type});
  };
  EXPECT_ERROR(masked(at::zeros({2}, at::kBool), AttnMaskType::no_mask), c10::ValueError,
               "MultiheadAttention: expected no attention_mask with the mask type \"no_mask\", got "
               "one. Call with attn_mask_type=\"arbitrary\".");
  EXPECT_ERROR(masked(at::zeros({2}, at::kInt), AttnMaskType::causal), c10::TypeError,
               "MultiheadAttention: expected attention_mask to be a tensor of booleans, or of "
               "floating-point numbers that are added to the scores, got Int. Pass "
               "mask.to(at::kBool) where 1 leaves a position out, mask == 0 where 1 keeps ");
  EXPECT_ERROR(masked(at::zeros({3}, at::kBool), AttnMaskType::causal), c10::ValueError,
               "MultiheadAttention: expected attention_mask that broadcasts to [batch, heads, "
               "positions, positions of keys] = [1, 4, 2, 2], got [3]. Reshape it; positions of "
               "keys are those of earlier calls too.");
  EXPECT_ERROR(apply_rotary_pos_emb(random({5, 1, 1, 4}), random({3, 1, 1, 4})), c10::ValueError,
               "apply_rotary_pos_emb: expected freqs of at least 5 positions and at most 4 "
               "features, got [3, 1, 1, 4]. Make them for the ");
  EXPECT_ERROR(apply_rotary_pos_emb(random({5, 1, 1, 8}), random({5, 1, 1, 7})), c10::ValueError,
               "apply_rotary_pos_emb: expected freqs of an even number of features, got 7. "
               "Features are turned in pairs.");
  EXPECT_THAT(
      [&] {
        InferenceParams before(1, 4);
        before.sequence_len_offset = -1;
        attention({.attention = {.layer_number = 1}})->forward(x, {.inference_params = &before});
      },
      ThrowsText<c10::ValueError>("InferenceParams: expected sequence_len_offset of at least 0, "
                                  "got -1. Count what is there already."));
  EXPECT_ERROR(
      Linear(8, 8,
             {.parameters_split = {{"a", 4}, {"b", 4}},
              .main_grads = {{"b_weight", at::zeros({4, 8})}}}),
      c10::ValueError,
      "0.basic_linear: expected no main_grad of a parameter that is several tensors, got one.");
}

}  // namespace
}  // namespace tandem::testing::front_attention
