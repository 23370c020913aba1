// TransformerLayer in C++ against its formula in float64: heads, rotary embedding, norms of heads,
// a cache, recipes, checkpoints.
#include "tandem/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <map>
#include <sstream>

#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_transformer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 32, kWide = 48, kHeads = 4, kLength = 7, kBatch = 2;
constexpr double kEps = 1e-5, kQkEps = 1e-6;

TransformerLayerOptions plain() {
  return {.attention = {.attention_dropout = 0}, .hidden_dropout = 0};
}

TransformerLayerOptions llama() {
  TransformerLayerOptions options = plain();
  options.attention.normalization = Normalization::rms_norm;
  options.activation = "swiglu";
  options.attention.bias = false;
  options.attention.num_gqa_groups = 2;
  return options;
}

TransformerLayer layer(const TransformerLayerOptions& options, at::ScalarType dtype = at::kDouble) {
  return randomized(TransformerLayer(kHidden, kWide, kHeads, options, dtype), 0.3);
}

using Named = std::map<std::string, at::Tensor>;

/// The parameters as leaves of another graph.
Named copies(const torch::nn::Module& module) {
  Named made;
  for (const auto& param : module.named_parameters())
    made[param.key()] = param.value().detach().clone().requires_grad_();
  return made;
}

/// The formula, in plain torch operations.
class Formula {
 public:
  Formula(const TransformerLayerOptions& options, const Named& params)
      : options_(options), params_(params) {}

  at::Tensor operator()(const at::Tensor& x, const at::Tensor& angles,
                        const at::Tensor& seen) const {
    const std::string at =
        options_.output_layernorm ? "self_attention.qkv." : "self_attention.layernorm_qkv.";
    const at::Tensor inside = options_.output_layernorm ? x : norm(x, at + "layer_norm_");
    std::vector<at::Tensor> heads = split(inside, at);
    if (options_.attention.qk_norm_before_rope) norm_heads(heads);
    if (angles.defined())
      for (size_t i = 0; i < 2; ++i) heads[i] = rotated(heads[i], angles);
    if (!options_.attention.qk_norm_before_rope) norm_heads(heads);
    const at::Tensor h = x + at::linear(attention(heads, seen), get("self_attention.proj.weight"),
                                        get("self_attention.proj.bias"));
    const at::Tensor z = at::linear(norm(h, "layernorm_mlp.layer_norm_"),
                                    get("layernorm_mlp.fc1_weight"), get("layernorm_mlp.fc1_bias"));
    const at::Tensor wide = options_.activation == "swiglu"
                                ? at::silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]
                                : at::gelu(z, "tanh");
    const at::Tensor y =
        h + at::linear(wide, get("layernorm_mlp.fc2_weight"), get("layernorm_mlp.fc2_bias"));
    return options_.output_layernorm ? norm(y, "layernorm.") : y;
  }

 private:
  at::Tensor get(const std::string& name) const {
    const auto found = params_.find(name);
    return found == params_.end() ? at::Tensor() : found->second;
  }
  int64_t groups() const { return options_.attention.num_gqa_groups.value_or(kHeads); }
  int64_t channels() const { return options_.attention.kv_channels.value_or(kHidden / kHeads); }

  at::Tensor norm(const at::Tensor& x, const std::string& at) const {
    const at::Tensor weight =
        get(at + "weight") + (options_.attention.zero_centered_gamma ? 1.0 : 0.0);
    return options_.attention.normalization == Normalization::rms_norm
               ? at::rms_norm(x, x.sizes().back(), weight, kEps)
               : at::layer_norm(x, x.sizes().back(), weight, get(at + "bias"), kEps);
  }

  /// Queries, keys, values, each [sequence, batch, heads, features].
  std::vector<at::Tensor> split(const at::Tensor& x, const std::string& at) const {
    std::vector<at::Tensor> parts;
    if (!options_.attention.fuse_qkv_params) {
      for (const char* name : {"query", "key", "value"})
        parts.push_back(at::linear(x, get(at + name + "_weight"), get(at + name + "_bias")));
    } else {
      const at::Tensor mixed = at::linear(x, get(at + "weight"), get(at + "bias"));
      const int64_t share = kHeads / groups();
      if (!options_.attention.qkv_weight_interleaved) {
        parts = mixed.split_with_sizes(
            {kHeads * channels(), groups() * channels(), groups() * channels()}, -1);
      } else {
        const at::Tensor by_group = mixed.unflatten(-1, {groups(), share + 2, channels()});
        parts = {by_group.narrow(-2, 0, share).flatten(-3), by_group.select(-2, share).flatten(-2),
                 by_group.select(-2, share + 1).flatten(-2)};
      }
    }
    for (at::Tensor& part : parts) part = part.unflatten(-1, {-1, channels()});
    return parts;
  }

  void norm_heads(std::vector<at::Tensor>& heads) const {
    const char* names[] = {"q", "k"};
    for (size_t i = 0; i < 2; ++i) {
      const std::string at = std::string("self_attention.") + names[i] + "_norm.";
      switch (options_.attention.qk_norm_type) {
        case QkNormType::none:
          break;
        case QkNormType::rms_norm:
          heads[i] = at::rms_norm(heads[i], channels(), get(at + "weight"), kQkEps);
          break;
        case QkNormType::layer_norm:
          heads[i] =
              at::layer_norm(heads[i], channels(), get(at + "weight"), get(at + "bias"), kQkEps);
          break;
        case QkNormType::l2_normalization:
          heads[i] = heads[i] * at::rsqrt(heads[i].square().sum(-1, true) + kQkEps);
      }
    }
  }

  /// Each pair of features is a complex number, times e^(i angle).
  at::Tensor rotated(const at::Tensor& x, const at::Tensor& angles) const {
    const bool by_two = options_.attention.rotary_pos_interleaved;
    const at::Tensor pairs =
        by_two ? x.unflatten(-1, {-1, 2}) : x.unflatten(-1, {2, -1}).transpose(-1, -2);
    const at::Tensor turns = at::polar(at::ones_like(angles), angles).unsqueeze(1).unsqueeze(1);
    const at::Tensor turned = at::view_as_real(at::view_as_complex(pairs.contiguous()) * turns);
    return (by_two ? turned : turned.transpose(-1, -2)).flatten(-2);
  }

  /// Heads one by one.
  at::Tensor attention(const std::vector<at::Tensor>& heads, const at::Tensor& seen) const {
    std::vector<at::Tensor> each;
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t g = h * groups() / kHeads;
      const at::Tensor q = heads[0].select(2, h).transpose(0, 1),
                       k = heads[1].select(2, g).transpose(0, 1),
                       v = heads[2].select(2, g).transpose(0, 1);
      const at::Tensor scores =
          q.matmul(k.transpose(-1, -2)) / std::sqrt(static_cast<double>(channels()));
      const double low = -std::numeric_limits<double>::infinity();
      each.push_back(
          scores.masked_fill(seen.logical_not(), low).softmax(-1).matmul(v).transpose(0, 1));
    }
    return at::cat(each, -1);
  }

  const TransformerLayerOptions& options_;
  const Named& params_;
};

at::Tensor causal(int64_t length = kLength) { return at::ones({length, length}, at::kBool).tril(); }

/// Angles in float64.
at::Tensor angles_of(int64_t channels) {
  const at::Tensor exponents = at::arange(0, channels, 2, at::kDouble) / channels;
  return at::outer(at::arange(kLength, at::kDouble), at::pow(10000.0, -exponents));
}

double distance(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  const double size = std::max(1.0, expected.abs().max().item<double>());
  return (got - expected).abs().max().item<double>() / size;
}

struct Case {
  const char* name;
  TransformerLayerOptions options;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases() {
  const auto with = [](TransformerLayerOptions options, auto&& change) {
    change(options);
    return options;
  };
  using Options = TransformerLayerOptions;
  return {
      {"gpt", plain()},
      {"llama", llama()},
      {"channels", with(plain(), [](Options& o) { o.attention.kv_channels = 6; })},
      {"qk_rms_norm",
       with(llama(), [](Options& o) { o.attention.qk_norm_type = QkNormType::rms_norm; })},
      {"qk_layer_norm",
       with(plain(), [](Options& o) { o.attention.qk_norm_type = QkNormType::layer_norm; })},
      {"qk_l2_before", with(plain(),
                            [](Options& o) {
                              o.attention.qk_norm_type = QkNormType::l2_normalization;
                              o.attention.qk_norm_before_rope = true;
                            })},
      {"interleaved", with(plain(),
                           [](Options& o) {
                             o.attention.rotary_pos_interleaved = o.attention.zero_centered_gamma =
                                 true;
                           })},
      {"fused_qkv", with(plain(),
                         [](Options& o) {
                           o.attention.fuse_qkv_params = true;
                           o.attention.num_gqa_groups = 2;
                         })},
      {"fused_qkv_apart", with(plain(),
                               [](Options& o) {
                                 o.attention.fuse_qkv_params = true;
                                 o.attention.qkv_weight_interleaved = false;
                               })},
      {"post_norm", with(plain(), [](Options& o) { o.output_layernorm = true; })},
  };
}

class TransformerFormula : public ::testing::TestWithParam<std::tuple<Case, bool>> {};
INSTANTIATE_TEST_SUITE_P(Cases, TransformerFormula,
                         ::testing::Combine(::testing::ValuesIn(cases()), ::testing::Bool()),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  std::string(std::get<1>(info.param) ? "_rotary" : "");
                         });

TEST_P(TransformerFormula, IsWhatTheLayerComputes) {
  const auto& [each, is_rotary] = GetParam();
  TransformerLayer made = layer(each.options);
  const Named params = copies(*made);
  const int64_t channels = each.options.attention.kv_channels.value_or(kHidden / kHeads);
  AttentionArguments arguments;
  if (is_rotary)
    arguments.rotary_pos_emb =
        RotaryPositionEmbedding(
            channels, RotaryOptions{.interleaved = each.options.attention.rotary_pos_interleaved})
            ->forward(kLength);
  const at::Tensor x = leaf({kLength, kBatch, kHidden}, at::kDouble),
                   other = x.detach().clone().requires_grad_(),
                   grad_y = random({kLength, kBatch, kHidden}, at::kDouble, 9);
  const at::Tensor y = made->forward(x, arguments);
  const at::Tensor expected = Formula(each.options, params)(
      other, is_rotary ? angles_of(channels) : at::Tensor(), causal());
  // Angles are float32, and what they turn.
  EXPECT_LT(distance(y, expected), is_rotary ? 2e-5 : 1e-10);
  y.backward(grad_y);
  expected.backward(grad_y);
  const double allowed = is_rotary ? 1e-3 : 1e-9;
  EXPECT_LT(distance(x.grad(), other.grad()), allowed);
  for (const auto& param : made->named_parameters())
    EXPECT_LT(distance(param.value().grad(), params.at(param.key()).grad()), allowed)
        << param.key();
}

TEST(TransformerLayer, HasTheNamesOfTransformerEngine) {
  TransformerLayerOptions options = llama();
  options.attention.qk_norm_type = QkNormType::rms_norm;
  EXPECT_THAT(names_of(*layer(options)),
              ElementsAre("self_attention.layernorm_qkv.layer_norm_weight",
                          "self_attention.layernorm_qkv.query_weight",
                          "self_attention.layernorm_qkv.key_weight",
                          "self_attention.layernorm_qkv.value_weight",
                          "self_attention.q_norm.weight", "self_attention.k_norm.weight",
                          "self_attention.proj.weight", "layernorm_mlp.layer_norm_weight",
                          "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"));
  options = plain();
  options.output_layernorm = true;
  options.attention.fuse_qkv_params = true;
  EXPECT_THAT(
      names_of(*layer(options)),
      ElementsAre("self_attention.qkv.weight", "self_attention.qkv.bias",
                  "self_attention.proj.weight", "self_attention.proj.bias",
                  "layernorm_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_bias",
                  "layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias", "layernorm_mlp.fc2_weight",
                  "layernorm_mlp.fc2_bias", "layernorm.weight", "layernorm.bias"));
}

TEST(TransformerLayer, FromTheAttentionOnItIsOnePipeline) {
  TransformerLayerOptions options = llama();
  options.hidden_dropout = 0.1;
  TransformerLayer made = layer(options, at::kFloat);
  const at::Tensor x = leaf({kLength, kBatch, kHidden});
  EXPECT_EQ(made->forward(x).grad_fn()->name(), "TandemPipelineBackward");
  EXPECT_THAT(made->explain(),
              ::testing::AllOf(HasSubstr("made    dropout_add"), HasSubstr("made    linear_glu"),
                               HasSubstr("add_rms_norm")));
  made->eval();
  EXPECT_TRUE(same(made->forward(x), made->forward(x))) << "no dropout in evaluation";
  made->train();
  EXPECT_FALSE(same(made->forward(x), made->forward(x)));
}

TEST(TransformerLayer, BatchMayComeFirst) {
  TransformerLayerOptions options = plain();
  options.attention.qkv_format = QkvFormat::bshd;
  TransformerLayer first = layer(plain()), second = layer(options);
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble);
  const AttentionArguments arguments{
      .rotary_pos_emb = RotaryPositionEmbedding(kHidden / kHeads)->forward(kLength)};
  EXPECT_LT(distance(second->forward(x.transpose(0, 1), arguments).transpose(0, 1),
                     first->forward(x, arguments)),
            1e-12);
}

class TransformerCache : public ::testing::TestWithParam<QkvFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, TransformerCache,
                         ::testing::Values(QkvFormat::sbhd, QkvFormat::bshd), [](const auto& info) {
                           return std::string(info.param == QkvFormat::sbhd ? "sbhd" : "bshd");
                         });

TEST_P(TransformerCache, GivesWhatTheWholeSequenceGives) {
  TransformerLayerOptions options = llama();
  options.attention.layer_number = 3;
  options.attention.qkv_format = GetParam();
  options.attention.qk_norm_type = QkNormType::rms_norm;
  TransformerLayer made = layer(options);
  made->eval();
  const c10::AutoGradMode no_grad(false);
  const auto turned = [&](const at::Tensor& t) {
    return GetParam() == QkvFormat::sbhd ? t : t.transpose(0, 1);
  };
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble),
                   angles = RotaryPositionEmbedding(kHidden / kHeads)->forward(kLength);
  const at::Tensor whole = turned(made->forward(turned(x), {.rotary_pos_emb = angles}));
  EXPECT_LT(
      distance(whole, Formula(options, copies(*made))(x, angles_of(kHidden / kHeads), causal())),
      2e-5);
  InferenceParams cache(kBatch, kLength);
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& piece : x.split_with_sizes({3, 1, 2, 1})) {
    pieces.push_back(turned(
        made->forward(turned(piece), {.rotary_pos_emb = angles, .inference_params = &cache})));
    cache.sequence_len_offset += piece.size(0);
  }
  EXPECT_LT(distance(at::cat(pieces), whole), 1e-12);
  EXPECT_EQ(cache.key_value_memory_dict.at(3).first.sizes(),
            (std::vector<int64_t>{kLength, kBatch, 2, kHidden / kHeads}));

  // The sequences change places, one of them goes on.
  cache.swap_key_value_dict(at::tensor({1, 0}));
  cache.sequence_len_offset = kLength - 1;
  cache.batch_size_offset = 1;
  const at::Tensor last = made->forward(turned(x.narrow(0, kLength - 1, 1).narrow(1, 0, 1)),
                                        {.rotary_pos_emb = angles, .inference_params = &cache});
  EXPECT_LT(distance(turned(last), whole.narrow(0, kLength - 1, 1).narrow(1, 0, 1)), 1e-12);
  EXPECT_THAT(
      [&] {
        cache.sequence_len_offset = kLength;
        made->forward(turned(x.narrow(0, 0, 1).narrow(1, 0, 1)), {.inference_params = &cache});
      },
      ThrowsText<c10::ValueError>("InferenceParams: expected at most 7 positions of 2 sequences, "
                                  "got 8 of 2. Make it larger."));
}

TEST(TransformerLayer, UnderRecipes) {
  TransformerLayer made = layer(llama(), at::kFloat);
  const at::Tensor x = leaf({32, kBatch, kHidden});
  const at::Tensor exact = made->forward(x).detach();
  for (const Recipe& recipe : {Recipe(Float8CurrentScaling{}), Recipe(MXFP8BlockScaling{}),
                               Recipe(DelayedScaling{.amax_history_len = 4})}) {
    made->zero_grad();
    at::Tensor y;
    for (int step = 0; step < 2; ++step) {
      {
        const Autocast region(true, recipe);
        y = made->forward(x);
      }
      y.square().mean().backward();
    }
    const double off = ((y - exact).norm() / exact.norm()).item<double>();
    EXPECT_GT(off, 0) << recipe.index();
    EXPECT_LT(off, 0.2) << recipe.index();
    for (const auto& param : made->named_parameters())
      EXPECT_TRUE(param.value().grad().isfinite().all().item<bool>()) << param.key();
  }
}

TEST(TransformerLayer, StateOfDelayedScalingLiesWithItsModules) {
  const DelayedScaling recipe{.amax_history_len = 4};
  TransformerLayer saved = layer(plain(), at::kFloat), loaded = layer(plain(), at::kFloat);
  const at::Tensor x = random({kLength, kBatch, kHidden});
  const auto step = [&](TransformerLayer& made) {
    const Autocast region(true, recipe);
    return made->forward(x);
  };
  for (int i = 0; i < 2; ++i) step(saved).sum().backward();
  std::vector<std::string> expected;
  for (const char* module :
       {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"})
    for (const char* state :
         {"forward.scale", "forward.amax_history", "backward.scale", "backward.amax_history"})
      expected.push_back(std::string(module) + ".recipe_state." + state);
  EXPECT_EQ(saved->named_buffers().keys(), expected);
  EXPECT_EQ(saved->named_buffers()["layernorm_mlp.recipe_state.forward.amax_history"].sizes(),
            (std::vector<int64_t>{4, 4}));
  save_and_load(saved, loaded);
  EXPECT_EQ(loaded->named_buffers().keys(), expected);
  EXPECT_TRUE(same(step(loaded), step(saved)));
}

TEST(TransformerLayer, WeightsOfOneProductStayTogether) {
  TransformerLayer saved = layer(llama(), at::kFloat), loaded(kHidden, kWide, kHeads, llama());
  const auto lie_together = [](const TransformerLayer& made) {
    const auto params = made->named_parameters();
    const auto part = [&](const char* name) {
      return params["self_attention.layernorm_qkv." + std::string(name) + "_weight"];
    };
    const auto end_of = [](const at::Tensor& t) {
      return static_cast<const char*>(t.const_data_ptr()) + t.nbytes();
    };
    return end_of(part("query")) == part("key").const_data_ptr() &&
           end_of(part("key")) == part("value").const_data_ptr();
  };
  EXPECT_TRUE(lie_together(saved));
  save_and_load(saved, loaded);
  EXPECT_TRUE(lie_together(loaded));
  loaded->eval(), saved->eval();
  const at::Tensor x = random({kLength, kBatch, kHidden});
  EXPECT_TRUE(same(loaded->forward(x), saved->forward(x)));
  loaded->to(at::kBFloat16);
  EXPECT_TRUE(lie_together(loaded));
  EXPECT_EQ(loaded->forward(x.to(at::kBFloat16)).scalar_type(), at::kBFloat16);
}

TEST(TransformerLayer, AddsGradientsOfWeightsToMainGrad) {
  const at::Tensor main_grad = at::zeros({kHidden, kHidden}, at::kDouble),
                   fc1 = at::zeros({kWide, kHidden}, at::kDouble);
  TransformerLayerOptions options = plain();
  TransformerLayer returned = layer(options);
  options.main_grads = {{"self_attention.proj.weight", main_grad},
                        {"layernorm_mlp.fc1_weight", fc1}};
  TransformerLayer added = layer(options);
  const at::Tensor x = random({kLength, kBatch, kHidden}, at::kDouble);
  for (TransformerLayer* made : {&returned, &added}) (*made)->forward(x).square().sum().backward();
  const auto expected = returned->named_parameters(), got = added->named_parameters();
  EXPECT_LT(distance(main_grad, expected["self_attention.proj.weight"].grad()), 1e-12);
  EXPECT_LT(distance(fc1, expected["layernorm_mlp.fc1_weight"].grad()), 1e-12);
  EXPECT_FALSE(got["layernorm_mlp.fc1_weight"].grad().defined());
  options.main_grads = {{"proj.weight", main_grad}};
  EXPECT_ERROR(layer(options), c10::ValueError,
               "TransformerLayer: expected main_grads of weights by names that begin with a "
               "child's, such as \"self_attention.\", got \"proj.weight\". Give the whole name.");
}

}  // namespace
}  // namespace tandem::testing::front_transformer
