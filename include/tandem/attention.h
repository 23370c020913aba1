// Attention as a module with the arguments and parameter names of transformer_engine.pytorch: a
// norm and the projection to queries, keys and values as one pipeline, torch's
// scaled_dot_product_attention, the projection behind it. What it is given at a call: angles of
// rotary position embedding, masks, keys and values of earlier positions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "tandem/export.h"
#include "tandem/modules.h"

namespace tandem {

/// Which positions a position sees.
enum class AttnMaskType : uint8_t {
  /// All.
  no_mask,
  /// None behind it.
  causal,
  /// Those that the attention mask leaves.
  padding,
  /// Of these, none behind it.
  padding_causal,
  /// None behind it, where the last query and the last key are at one place.
  causal_bottom_right,
  /// Those that the attention mask leaves.
  arbitrary,
};

/// Which dimension of [sequence, batch, features] comes first: sequence, or batch.
enum class QkvFormat : uint8_t { sbhd, bshd };

/// What goes over the features of each head of queries and keys.
enum class QkNormType : uint8_t { none, rms_norm, layer_norm, l2_normalization };

/// How many positions before and behind its own one sees; -1: all.
using Window = std::pair<int64_t, int64_t>;

struct RotaryOptions {
  /// The share of the features of a head that is rotated, the first ones.
  double rotary_percent = 1;
  /// Positions are divided by it, at every length.
  std::optional<double> seq_len_interpolation_factor = std::nullopt;
  /// How many positions the model was trained with. A sequence longer than the factor times as many
  /// has its positions divided by more, so that they end where those of training did. nullopt: no
  /// position is divided.
  std::optional<int64_t> pretrained_max_position_embeddings = std::nullopt;
  /// The base of the frequencies.
  double rotary_base = 10000;
  /// Features 2 i and 2 i + 1 are a pair, rather than i and i + dim / 2.
  bool interleaved = false;
};

class TANDEM_API RotaryPositionEmbeddingImpl : public torch::nn::Module {
 public:
  explicit RotaryPositionEmbeddingImpl(int64_t dim, const RotaryOptions& rotary = {});

  /// The angles of positions `offset` to `offset + max_seq_len`, float32 [max_seq_len, 1, 1,
  /// features that are rotated].
  at::Tensor forward(int64_t max_seq_len, int64_t offset = 0) const;

  /// Angles are made at each call, and float32: of what is asked here the device alone counts.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  RotaryOptions options_;
  int64_t rotated_;
  at::Device device_ = at::kCPU;
};

/// Angles of rotary position embedding: position p and pair i of `dim` / 2 give
/// p / rotary_base^(2 i / dim).
///
///   const at::Tensor angles = tandem::RotaryPositionEmbedding(64)->forward(2048);
///
/// Throws: c10::ValueError where the features that are rotated are not an even number up to dim,
///         and where options of interpolation are not positive.
class RotaryPositionEmbedding : public torch::nn::ModuleHolder<RotaryPositionEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<RotaryPositionEmbeddingImpl>::ModuleHolder;
  using Impl = RotaryPositionEmbeddingImpl;
  explicit RotaryPositionEmbedding(int64_t dim, const RotaryOptions& rotary = {})
      : ModuleHolder(std::make_shared<RotaryPositionEmbeddingImpl>(dim, rotary)) {}
};

/// Rotates pairs of features of `t` by `freqs`, in float32; the result has the dtype of `t`.
///
/// Shapes: t [sequence, batch, heads, features], or with bshd [batch, sequence, heads, features];
///         freqs [at least sequence, 1, 1, features that are rotated].
/// Throws: c10::ValueError where freqs has fewer positions, or more features.
TANDEM_API at::Tensor apply_rotary_pos_emb(const at::Tensor& t, const at::Tensor& freqs,
                                           QkvFormat tensor_format = QkvFormat::sbhd,
                                           bool interleaved = false);

/// Keys and values of sequences that are generated, by layer.
///
///   tandem::InferenceParams cache(batch, length);
///   for (const at::Tensor& piece : x.split(1)) {
///     y = layer->forward(piece, {.inference_params = &cache});
///     cache.sequence_len_offset += piece.size(0);
///   }
class TANDEM_API InferenceParams {
 public:
  /// How many sequences there may be, how long they may become. Room is made by the first call of
  /// each layer.
  ///
  /// Throws: c10::ValueError where they are not positive.
  InferenceParams(int64_t max_batch_size, int64_t max_sequence_length);

  /// Reorders the sequences, as a beam search does: indices int64 [sequences].
  void swap_key_value_dict(const at::Tensor& batch_indices);

  /// Takes up keys and values [sequence, batch, heads, features] of new positions; those of all
  /// positions so far. Gradients reach the new positions. Those of earlier calls count as
  /// constants, and where they came with a gradient, backward says so. `writer` is the module that
  /// asks, which is then the only one to write under this number; none: any may.
  ///
  /// Throws: c10::ValueError where there are more than there is room for, and where another module
  ///         has written under this number.
  std::pair<at::Tensor, at::Tensor> step(int64_t layer, const at::Tensor& key,
                                         const at::Tensor& value,
                                         const std::weak_ptr<const torch::nn::Module>& writer = {});

  const int64_t max_batch_size, max_sequence_length;
  /// Positions that are there already: who generates moves it on, once per step.
  int64_t sequence_len_offset = 0;
  int64_t batch_size_offset = 0;
  std::map<int64_t, std::pair<at::Tensor, at::Tensor>> key_value_memory_dict;

 private:
  void claim(int64_t layer, const std::shared_ptr<const torch::nn::Module>& writer);

  /// Of the layers in the map.
  std::map<int64_t, std::weak_ptr<const torch::nn::Module>> writers_;
  /// Layers and sequences, some of whose keys and values have come with a gradient: numbers
  /// layer * max_batch_size + sequence.
  std::set<int64_t> recorded_;
};

/// Angles for queries and keys, or for each: none where they are undefined.
struct RotaryAngles {
  RotaryAngles() = default;
  RotaryAngles(const at::Tensor& of_both) : query(of_both), key(of_both) {}  // NOLINT: as Python's
  RotaryAngles(at::Tensor of_query, at::Tensor of_key)
      : query(std::move(of_query)), key(std::move(of_key)) {}
  at::Tensor query, key;
};

/// What a call is given beside x.
struct AttentionArguments {
  /// What broadcasts to [batch, heads, positions, positions of keys]: booleans, of which true
  /// leaves a position out, or numbers that are added to the scores. A causal type leaves out what
  /// is behind a position as well.
  at::Tensor attention_mask = {};
  /// Instead of those of the options.
  std::optional<AttnMaskType> attn_mask_type = std::nullopt;
  std::optional<Window> window_size = std::nullopt;
  RotaryAngles rotary_pos_emb = {};
  /// Keys and values of earlier positions.
  InferenceParams* inference_params = nullptr;
};

/// What a MultiheadAttention and a TransformerLayer are told alike.
struct AttentionOptions {
  /// Features of a head; nullopt: hidden_size / num_attention_heads.
  std::optional<int64_t> kv_channels = std::nullopt;
  /// Probability with which, in training, a weight of the attention becomes zero.
  double attention_dropout = 0.1;
  /// Of norms, those of heads aside.
  double layernorm_epsilon = 1e-5;
  /// Of the weights before and behind the attention, and before and behind the activation of a
  /// layer.
  Init init_method = init::normal(0.023), output_layer_init_method = init::normal(0.023);
  /// Under which InferenceParams keeps keys and values.
  std::optional<int64_t> layer_number = std::nullopt;
  AttnMaskType attn_mask_type = AttnMaskType::causal;
  /// (-1, -1) or, with a causal mask, (-1, 0): no other value is known yet.
  std::optional<Window> window_size = std::nullopt;
  /// Unless `mode` is none, ranks share the heads: the first product is column-parallel, the second
  /// row-parallel; so are those of a layer's MLP.
  TensorParallel tensor_parallel = {};
  /// Heads of keys and values; nullopt: as many as of queries.
  std::optional<int64_t> num_gqa_groups = std::nullopt;
  /// Queries, keys and values have one weight.
  bool fuse_qkv_params = false;
  /// The factor of norms, those of heads aside, is 1 + weight.
  bool zero_centered_gamma = false;
  /// The one weight of queries, keys and values has the heads of each group of keys together, and
  /// not all queries first.
  bool qkv_weight_interleaved = true;
  /// Products have a bias.
  bool bias = true;
  /// Of norms, those of heads aside.
  Normalization normalization = Normalization::layer_norm;
  QkvFormat qkv_format = QkvFormat::sbhd;
  QkNormType qk_norm_type = QkNormType::none;
  double qk_norm_eps = 1e-6;
  /// They come before rotary position embedding.
  bool qk_norm_before_rope = false;
  /// As of RotaryOptions.
  bool rotary_pos_interleaved = false;
};

struct MultiheadAttentionOptions {
  AttentionOptions attention = {};
  /// By names of parameters, such as "proj.weight".
  MainGrads main_grads = {};
  /// The bias of the projection behind the attention is not added but returned.
  bool return_bias = false;
  /// With input_layernorm, its output is returned.
  bool return_layernorm_output = false;
  /// A norm comes first.
  bool input_layernorm = false;
};

class TANDEM_API MultiheadAttentionImpl : public torch::nn::Module {
 public:
  MultiheadAttentionImpl(int64_t hidden_size, int64_t num_attention_heads,
                         const MultiheadAttentionOptions& own = {},
                         const at::TensorOptions& options = {});

  /// y. Throws c10::ValueError where the options ask for more: `forward_all` returns it.
  at::Tensor forward(const at::Tensor& x, const AttentionArguments& arguments = {});
  ModuleOutputs forward_all(const at::Tensor& x, const AttentionArguments& arguments = {});

  /// What the projection behind the attention reads, and the output of the norm if it is returned.
  std::pair<at::Tensor, at::Tensor> context(const at::Tensor& x,
                                            const AttentionArguments& arguments = {});
  /// That of the call, or of the options.
  AttnMaskType mask_type(const AttentionArguments& arguments) const {
    return arguments.attn_mask_type.value_or(options_.attn_mask_type);
  }
  /// The child "proj".
  const std::shared_ptr<OpModule>& projection_out() const { return projection_out_; }

 private:
  struct Heads {
    at::Tensor query, key, value;
  };
  Heads split(const at::Tensor& mixed) const;
  void norm(Heads& heads) const;
  void rotate(Heads& heads, const RotaryAngles& angles, int64_t offset) const;
  void take_up(Heads& heads, InferenceParams& params) const;
  void check_call(const AttentionArguments& arguments) const;
  /// The mask as torch's attention reads it: true where a position is seen, or what is added to the
  /// scores.
  at::Tensor seen_or_added(const at::Tensor& mask, const at::Tensor& mixed, int64_t offset) const;
  at::Tensor attend(const Heads& heads, std::optional<at::Tensor> mask, AttnMaskType type) const;

  AttentionOptions options_;
  bool returns_bias_, returns_norm_;
  /// Features of a head, heads of this rank, groups of this rank.
  int64_t channels_, heads_, groups_;
  std::shared_ptr<OpModule> projection_in_, q_norm_, k_norm_, projection_out_;
};

/// y = attention(norm(x) Wq^T, norm(x) Wk^T, norm(x) Wv^T) Wo^T, the attention torch's
/// scaled_dot_product_attention.
///
///   tandem::MultiheadAttention layer(h, 8, {.attention = {.num_gqa_groups = 2, .bias = false}});
///
/// Parameters: `layernorm_qkv` (or `qkv`, without a norm), with query_weight, key_weight and
/// value_weight or, with fuse_qkv_params, one weight; `q_norm` and `k_norm`; `proj`.
/// Shapes: x [sequence, batch, hidden_size], or with bshd [batch, sequence, hidden_size] -> y.
/// Throws: c10::ValueError where groups do not divide heads, heads do not divide features, ranks
///         cannot share heads; c10::NotImplementedError for a window; a call, where its mask type
///         needs a mask and there is none, or is no_mask and there is one, where the mask is of
///         integers (c10::TypeError) or does not fit, and where there are inference_params but no
///         layer_number.
class MultiheadAttention : public torch::nn::ModuleHolder<MultiheadAttentionImpl> {
 public:
  using torch::nn::ModuleHolder<MultiheadAttentionImpl>::ModuleHolder;
  using Impl = MultiheadAttentionImpl;
  MultiheadAttention(int64_t hidden_size, int64_t num_attention_heads,
                     const MultiheadAttentionOptions& own = {},
                     const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<MultiheadAttentionImpl>(hidden_size, num_attention_heads, own,
                                                              options)) {}
};

}  // namespace tandem
