// Attention as a module with the arguments and parameter names of transformer_engine.pytorch. One
// pipeline computes a norm and the projection to queries, keys and values, torch's
// scaled_dot_product_attention follows, and a second pipeline computes the output projection. The
// header also has what a call takes beside x: angles of rotary position embedding, masks, and the
// cache of keys and values.
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

/// The keys that a query attends to.
enum class AttnMaskType : uint8_t {
  /// All keys.
  no_mask,
  /// The keys up to the position of the query; the last query and the last key have one position.
  causal,
  /// The keys that the attention mask does not leave out.
  padding,
  /// The keys that both `padding` and `causal` allow.
  padding_causal,
  /// The keys that `causal` allows, which aligns the last query and the last key too.
  causal_bottom_right,
  /// The keys that the attention mask does not leave out.
  arbitrary,
};

/// The order of the first two dimensions: sbhd is [sequence, batch, ...], bshd [batch, sequence,
/// ...].
enum class QkvFormat : uint8_t { sbhd, bshd };

/// The norm over the features of each head of queries and keys.
enum class QkNormType : uint8_t { none, rms_norm, layer_norm, l2_normalization };

/// Numbers of positions before and after a query to which it attends; -1: all.
using Window = std::pair<int64_t, int64_t>;

struct RotaryOptions {
  /// The share of a head's features that is rotated; the first features are.
  double rotary_percent = 1;
  /// Positions are divided by this factor where `pretrained_max_position_embeddings` is set too.
  std::optional<double> seq_len_interpolation_factor = std::nullopt;
  /// The number of positions with which the model was trained. Positions of a sequence that is
  /// longer than the factor times this number are divided by length / this number instead, so that
  /// they end where the positions of training ended. nullopt: no position is divided.
  std::optional<int64_t> pretrained_max_position_embeddings = std::nullopt;
  /// The base of the frequencies.
  double rotary_base = 10000;
  /// Features 2 i and 2 i + 1 are a pair; else features i and i + rotated / 2 are, where `rotated`
  /// is the number of rotated features.
  bool interleaved = false;
};

class TANDEM_API RotaryPositionEmbeddingImpl : public torch::nn::Module {
 public:
  explicit RotaryPositionEmbeddingImpl(int64_t dim, const RotaryOptions& rotary = {});

  /// Returns the angles of the positions from `offset` on.
  ///
  /// Shapes:  [max_seq_len, 1, 1, rotated features].
  /// Dtypes:  float32.
  at::Tensor forward(int64_t max_seq_len, int64_t offset = 0) const;

  /// Sets the device on which `forward` creates angles; `dtype` is ignored, as angles are float32.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  RotaryOptions options_;
  int64_t rotated_;
  at::Device device_ = at::kCPU;
};

/// Angles of rotary position embedding: pair i of the `rotated` features at position p gets the
/// angle p / rotary_base^(2 i / rotated), with rotated = dim * rotary_percent.
///
///   const at::Tensor angles = tandem::RotaryPositionEmbedding(64)->forward(2048);
///
/// Throws:  c10::ValueError where the number of rotated features is odd, 0 or above dim, and where
///          an option of interpolation is not positive.
/// Source:  Su et al. 2021, arXiv:2104.09864.
class RotaryPositionEmbedding : public torch::nn::ModuleHolder<RotaryPositionEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<RotaryPositionEmbeddingImpl>::ModuleHolder;
  using Impl = RotaryPositionEmbeddingImpl;
  explicit RotaryPositionEmbedding(int64_t dim, const RotaryOptions& rotary = {})
      : ModuleHolder(std::make_shared<RotaryPositionEmbeddingImpl>(dim, rotary)) {}
};

/// Rotates the pairs of features of `t` by the angles `freqs`, in float32.
///
/// Shapes:  t [sequence, batch, heads, features], or with bshd [batch, sequence, heads, features];
///          freqs [at least sequence, 1, 1, rotated features], an even number of them -> a tensor
///          like t.
/// Dtypes:  the result has the dtype of `t`.
/// Throws:  c10::ValueError where freqs has fewer positions, or more features, than t.
/// Source:  Su et al. 2021, arXiv:2104.09864.
TANDEM_API at::Tensor apply_rotary_pos_emb(const at::Tensor& t, const at::Tensor& freqs,
                                           QkvFormat tensor_format = QkvFormat::sbhd,
                                           bool interleaved = false);

/// The keys and values of all earlier positions of generated sequences, by layer.
///
///   tandem::InferenceParams cache(batch, length);
///   for (const at::Tensor& piece : x.split(1)) {
///     y = layer->forward(piece, {.inference_params = &cache});
///     cache.sequence_len_offset += piece.size(0);
///   }
class TANDEM_API InferenceParams {
 public:
  /// Sets the largest number of sequences and the largest number of positions of a sequence. The
  /// first call of each layer allocates the layer's memory.
  ///
  /// Throws:  c10::ValueError where a number is not positive.
  InferenceParams(int64_t max_batch_size, int64_t max_sequence_length);

  /// Reorders the sequences of every layer, as a beam search does.
  ///
  /// Shapes:  batch_indices [sequences].
  /// Dtypes:  batch_indices int64.
  void swap_key_value_dict(const at::Tensor& batch_indices);

  /// Stores the keys and values of new positions under the number `layer`, and returns the keys and
  /// values of all positions so far. Gradients reach the new positions. Earlier positions are
  /// constants: backward throws where an earlier call stored them with a gradient. `writer` is the
  /// module that calls; no other module may then store under this number. Without a writer any
  /// module may.
  ///
  /// Shapes:  key, value [new positions, batch, heads, features] -> both [positions, batch, heads,
  ///          features].
  /// Dtypes:  the results have the dtypes of key and value.
  /// Throws:  c10::ValueError where positions or sequences exceed the sizes of the constructor, and
  ///          where another module has stored under this number.
  std::pair<at::Tensor, at::Tensor> step(int64_t layer, const at::Tensor& key,
                                         const at::Tensor& value,
                                         const std::weak_ptr<const torch::nn::Module>& writer = {});

  const int64_t max_batch_size, max_sequence_length;
  /// The number of positions that are stored already. The caller advances it after each step.
  int64_t sequence_len_offset = 0;
  /// The index of the first sequence of a call's batch.
  int64_t batch_size_offset = 0;
  /// Keys and values by layer number.
  ///
  /// Shapes:  [max_sequence_length, max_batch_size, heads, features] each.
  std::map<int64_t, std::pair<at::Tensor, at::Tensor>> key_value_memory_dict;

 private:
  void claim(int64_t layer, const std::shared_ptr<const torch::nn::Module>& writer);

  /// The module that stores under each number of `key_value_memory_dict`.
  std::map<int64_t, std::weak_ptr<const torch::nn::Module>> writers_;
  /// Layers and sequences for which a call stored keys or values with a gradient, as the numbers
  /// layer * max_batch_size + sequence.
  std::set<int64_t> recorded_;
};

/// Angles for queries and for keys; an undefined tensor leaves its operand unrotated.
struct RotaryAngles {
  RotaryAngles() = default;
  RotaryAngles(const at::Tensor& of_both) : query(of_both), key(of_both) {}  // NOLINT: as Python's
  RotaryAngles(at::Tensor of_query, at::Tensor of_key)
      : query(std::move(of_query)), key(std::move(of_key)) {}
  at::Tensor query, key;
};

/// The arguments of a call beside x.
struct AttentionArguments {
  /// A mask that broadcasts to [batch, heads, positions, positions of keys]. True in a boolean mask
  /// leaves a key out; a floating-point mask is added to the scores. A causal type leaves out the
  /// keys after each query as well.
  at::Tensor attention_mask = {};
  /// These two replace the members of AttentionOptions with these names.
  std::optional<AttnMaskType> attn_mask_type = std::nullopt;
  std::optional<Window> window_size = std::nullopt;
  RotaryAngles rotary_pos_emb = {};
  /// The keys and values of earlier positions; null: the call attends to its own positions only.
  InferenceParams* inference_params = nullptr;
};

/// Options that MultiheadAttention and TransformerLayer share.
struct AttentionOptions {
  /// Features of a head; nullopt: hidden_size / num_attention_heads.
  std::optional<int64_t> kv_channels = std::nullopt;
  /// Probability with which, in training, a weight of the attention becomes zero.
  double attention_dropout = 0.1;
  /// The eps of every norm but the norms of heads.
  double layernorm_epsilon = 1e-5;
  /// The first values of weights: init_method of the projection to queries, keys and values, and of
  /// a layer's product before the activation; output_layer_init_method of the two other products.
  Init init_method = init::normal(0.023), output_layer_init_method = init::normal(0.023);
  /// The number under which InferenceParams stores the keys and values of this layer.
  std::optional<int64_t> layer_number = std::nullopt;
  AttnMaskType attn_mask_type = AttnMaskType::causal;
  /// nullopt, (-1, -1), or (-1, 0) with a causal mask; Tandem implements no other window.
  std::optional<Window> window_size = std::nullopt;
  /// Unless `mode` is none, ranks share the heads: the projection to queries, keys and values is
  /// column-parallel and the output projection row-parallel, as the two products of a layer's MLP
  /// are.
  TensorParallel tensor_parallel = {};
  /// Heads of keys and values; nullopt: num_attention_heads.
  std::optional<int64_t> num_gqa_groups = std::nullopt;
  /// Queries, keys and values are the result of one weight, not of three.
  bool fuse_qkv_params = false;
  /// Every norm but the norms of heads multiplies by 1 + weight.
  bool zero_centered_gamma = false;
  /// With fuse_qkv_params: true, the weight holds group after group, each with its queries, key and
  /// value; false, it holds all queries, then all keys, then all values.
  bool qkv_weight_interleaved = true;
  /// Every product has a bias.
  bool bias = true;
  /// The kind of every norm but the norms of heads.
  Normalization normalization = Normalization::layer_norm;
  QkvFormat qkv_format = QkvFormat::sbhd;
  QkNormType qk_norm_type = QkNormType::none;
  double qk_norm_eps = 1e-6;
  /// The norms of heads come before rotary position embedding.
  bool qk_norm_before_rope = false;
  /// RotaryOptions::interleaved.
  bool rotary_pos_interleaved = false;
};

struct MultiheadAttentionOptions {
  AttentionOptions attention = {};
  /// Keys are names of parameters, such as "proj.weight".
  MainGrads main_grads = {};
  /// The bias of the output projection is returned, not added.
  bool return_bias = false;
  /// With input_layernorm, the output of the norm is returned.
  bool return_layernorm_output = false;
  /// A norm comes before the projection to queries, keys and values.
  bool input_layernorm = false;
};

class TANDEM_API MultiheadAttentionImpl : public torch::nn::Module {
 public:
  MultiheadAttentionImpl(int64_t hidden_size, int64_t num_attention_heads,
                         const MultiheadAttentionOptions& own = {},
                         const at::TensorOptions& options = {});

  /// Returns y alone.
  ///
  /// Throws:  c10::ValueError where the options return more; `forward_all` returns everything.
  at::Tensor forward(const at::Tensor& x, const AttentionArguments& arguments = {});
  /// Returns y, and the outputs that `return_bias` and `return_layernorm_output` ask for.
  ModuleOutputs forward_all(const at::Tensor& x, const AttentionArguments& arguments = {});

  /// Returns the operand of the output projection, and the output of the norm where the options
  /// return it.
  std::pair<at::Tensor, at::Tensor> context(const at::Tensor& x,
                                            const AttentionArguments& arguments = {});
  /// The mask type of the call, else of the options.
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
  /// Converts a mask of the caller to a mask of torch's attention, in which true keeps a key and a
  /// number is added to the score.
  at::Tensor seen_or_added(const at::Tensor& mask, const at::Tensor& mixed, int64_t offset) const;
  at::Tensor attend(const Heads& heads, std::optional<at::Tensor> mask, AttnMaskType type) const;

  AttentionOptions options_;
  bool returns_bias_, returns_norm_;
  /// Features of a head, and this rank's heads of queries and of keys.
  int64_t channels_, heads_, groups_;
  std::shared_ptr<OpModule> projection_in_, q_norm_, k_norm_, projection_out_;
};

/// y = attention(norm(x) Wq^T, norm(x) Wk^T, norm(x) Wv^T) Wo^T, where `attention` is torch's
/// scaled_dot_product_attention.
///
///   tandem::MultiheadAttention layer(h, 8, {.attention = {.num_gqa_groups = 2, .bias = false}});
///
/// Parameters: `layernorm_qkv` (without a norm `qkv`) has query_weight, key_weight and
/// value_weight, or one weight with fuse_qkv_params; `q_norm` and `k_norm`; `proj`.
///
/// Shapes:  x [sequence, batch, hidden_size], or with bshd [batch, sequence, hidden_size] -> y like
///          x.
/// Throws:  the constructor: c10::ValueError where groups do not divide heads, where heads do not
///          divide hidden_size and kv_channels is nullopt, where ranks cannot share heads evenly,
///          and for a name in main_grads that begins with no child's name; c10::NotImplementedError
///          for a window.
///          A call: c10::ValueError where the mask type needs a mask and the call has none, where
///          it is no_mask and the call has one, where the mask does not broadcast, and where a call
///          has inference_params and the options have no layer_number; c10::TypeError for a mask of
///          integers.
/// Source:  Vaswani et al. 2017, arXiv:1706.03762.
using MultiheadAttention =
    ModuleOf<MultiheadAttentionImpl, MultiheadAttentionOptions, int64_t, int64_t>;

}  // namespace tandem
