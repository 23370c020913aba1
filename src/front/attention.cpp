#include "front/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <limits>

#include "front/attention_rules.h"
#include "front/parts.h"
#include "kernel_ops/attention/rotary.h"
#include "tandem/modules.h"

namespace tandem {

using at::Tensor;

namespace {

bool is_causal(AttnMaskType type) {
  return type == AttnMaskType::causal || type == AttnMaskType::padding_causal ||
         type == AttnMaskType::causal_bottom_right;
}

bool needs_mask(AttnMaskType type) {
  return type == AttnMaskType::padding || type == AttnMaskType::padding_causal ||
         type == AttnMaskType::arbitrary;
}

std::string_view name_of(AttnMaskType type) { return kAttnMaskNames[static_cast<size_t>(type)]; }

}  // namespace

AttentionHeads attention_heads(const std::string& op, int64_t hidden_size,
                               int64_t num_attention_heads, std::optional<int64_t> num_gqa_groups,
                               std::optional<int64_t> kv_channels, int64_t ranks) {
  const int64_t hidden = ops::share(op, "hidden_size", hidden_size, 1),
                heads = ops::share(op, "num_attention_heads", num_attention_heads, 1),
                groups = ops::share(op, "num_gqa_groups", num_gqa_groups.value_or(heads), 1);
  TORCH_CHECK_VALUE(heads % groups == 0, op, ": expected num_gqa_groups that divides the ", heads,
                    " attention heads, got ", groups, ". Use a divisor.");
  TORCH_CHECK_VALUE(kv_channels || hidden % heads == 0, op, ": expected hidden_size that ", heads,
                    " heads share evenly, got ", hidden, ". Give kv_channels.");
  return {ops::share(op, "kv_channels", kv_channels.value_or(hidden / heads), 1),
          ops::share(op, "num_attention_heads", heads, ranks),
          ops::share(op, "num_gqa_groups", groups, ranks)};
}

void check_window(const std::string& op, std::optional<Window> window, AttnMaskType mask_type) {
  const Window allowed{-1, is_causal(mask_type) ? 0 : -1};
  TORCH_CHECK_NOT_IMPLEMENTED(!window || *window == allowed || *window == Window(-1, -1), op,
                              ": expected window_size (", allowed.first, ", ", allowed.second,
                              ") or None, got (", window->first, ", ", window->second,
                              "). Leave positions out with attention_mask.");
}

MainGrads main_grads_of(const std::string& op, const MainGrads& main_grads,
                        const std::string& child, std::initializer_list<const char*> children) {
  MainGrads own;
  for (const auto& [name, main_grad] : main_grads) {
    const std::string first = name.substr(0, name.find('.'));
    TORCH_CHECK_VALUE(std::ranges::count(children, first) != 0 && first != name, op,
                      ": expected main_grads of weights by names that begin with a child's, such ",
                      "as \"", *children.begin(), ".\", got \"", name, "\". Give the whole name.");
    if (first == child) own[name.substr(first.size() + 1)] = main_grad;
  }
  return own;
}

// Rotary position embedding.

RotaryPositionEmbeddingImpl::RotaryPositionEmbeddingImpl(int64_t dim, const RotaryOptions& rotary)
    : torch::nn::Module("RotaryPositionEmbedding"),
      options_(rotary),
      rotated_(static_cast<int64_t>(static_cast<double>(ops::share(name(), "dim", dim, 1)) *
                                    rotary.rotary_percent)) {
  TORCH_CHECK_VALUE(rotated_ % 2 == 0 && rotated_ > 0 && rotated_ <= dim, name(),
                    ": expected an even number of features to rotate, up to dim, got ", rotated_,
                    ". Change rotary_percent.");
  const auto factor = rotary.seq_len_interpolation_factor;
  TORCH_CHECK_VALUE(!factor || *factor > 0, name(), ": expected seq_len_interpolation_factor > 0, ",
                    "got ", *factor, ". Leave it out where positions are not divided.");
  if (const auto trained = rotary.pretrained_max_position_embeddings)
    ops::share(name(), "pretrained_max_position_embeddings", *trained, 1);
}

Tensor RotaryPositionEmbeddingImpl::forward(int64_t max_seq_len, int64_t offset) const {
  const at::TensorOptions real = at::TensorOptions(device_).dtype(at::kFloat);
  Tensor positions = at::arange(max_seq_len, real) + offset;
  const auto factor = options_.seq_len_interpolation_factor;
  if (const auto trained = options_.pretrained_max_position_embeddings; factor && trained)
    positions =
        positions *
        std::min(1 / *factor, static_cast<double>(*trained) /
                                  static_cast<double>(std::max<int64_t>(offset + max_seq_len, 1)));
  const Tensor angles = kernel_ops::rotary_angles(positions, rotated_, options_.rotary_base);
  return kernel_ops::angles_of_features(angles, options_.interleaved).unsqueeze(1).unsqueeze(1);
}

void RotaryPositionEmbeddingImpl::to(torch::Dtype /*dtype*/, bool /*non_blocking*/) {}
void RotaryPositionEmbeddingImpl::to(torch::Device device, torch::Dtype /*dtype*/,
                                     bool non_blocking) {
  to(device, non_blocking);
}
void RotaryPositionEmbeddingImpl::to(torch::Device device, bool /*non_blocking*/) {
  device_ = device;
}

Tensor apply_rotary_pos_emb(const Tensor& t, const Tensor& freqs, QkvFormat tensor_format,
                            bool interleaved) {
  const bool is_sbhd = tensor_format == QkvFormat::sbhd;
  const int64_t length = t.size(is_sbhd ? 0 : 1), rotated = freqs.size(-1), all = t.size(-1);
  TORCH_CHECK_VALUE(freqs.size(0) >= length && rotated <= all,
                    "apply_rotary_pos_emb: expected freqs of at least ", length,
                    " positions and at most ", all, " features, got ", freqs.sizes(),
                    ". Make them for the sequence.");
  TORCH_CHECK_VALUE(rotated % 2 == 0,
                    "apply_rotary_pos_emb: expected freqs of an even number of features, got ",
                    rotated, ". Features are turned in pairs.");
  Tensor angles = freqs.narrow(0, 0, length);
  if (!is_sbhd) angles = angles.transpose(0, 1);
  angles = angles.to(at::kFloat);
  return kernel_ops::turned(t, angles.cos(), angles.sin(), interleaved);
}

// Keys and values of earlier positions.

namespace {

/// Returns `kept`, or a copy where `fresh` has a wider dtype, as after autocast, and where `kept`
/// was created in an inference mode that has ended.
Tensor writable(const Tensor& kept, const Tensor& fresh) {
  const bool is_closed = kept.is_inference() && !c10::InferenceMode::is_enabled();
  return kept.to(c10::promoteTypes(kept.scalar_type(), fresh.scalar_type()),
                 /*non_blocking=*/false, /*copy=*/is_closed);
}

Tensor refuse_gradient(const Tensor& grad) {
  TORCH_CHECK_VALUE(false, "InferenceParams: expected gradients of keys and values of one call, ",
                    "got one of keys and values that an earlier call has written, whose graph is ",
                    "not kept. Call the layer once for the whole sequence, or make earlier calls ",
                    "under at::NoGradGuard.");
  return grad;
}

}  // namespace

InferenceParams::InferenceParams(int64_t batch, int64_t length)
    : max_batch_size(ops::share("InferenceParams", "max_batch_size", batch, 1)),
      max_sequence_length(ops::share("InferenceParams", "max_sequence_length", length, 1)) {}

void InferenceParams::swap_key_value_dict(const Tensor& batch_indices) {
  for (auto& [layer, memory] : key_value_memory_dict)
    memory = {memory.first.index_select(1, batch_indices),
              memory.second.index_select(1, batch_indices)};
  for (const int64_t one : std::set<int64_t>(recorded_))  // all sequences; indices stay unread
    for (int64_t row = 0; row < max_batch_size; ++row)
      recorded_.insert(one - one % max_batch_size + row);
}

std::pair<Tensor, Tensor> InferenceParams::step(
    int64_t layer, const Tensor& key, const Tensor& value,
    const std::weak_ptr<const torch::nn::Module>& writer) {
  const int64_t begin = sequence_len_offset, length = key.size(0), batch = key.size(1),
                end = begin + length, last = batch_size_offset + batch;
  for (const auto& [name, offset] : {std::pair("sequence_len_offset", sequence_len_offset),
                                     std::pair("batch_size_offset", batch_size_offset)})
    TORCH_CHECK_VALUE(offset >= 0, "InferenceParams: expected ", name, " of at least 0, got ",
                      offset, ". Count what is there already.");
  TORCH_CHECK_VALUE(end <= max_sequence_length && last <= max_batch_size,
                    "InferenceParams: expected at most ", max_sequence_length, " positions of ",
                    max_batch_size, " sequences, got ", end, " of ", last, ". Make it larger.");
  claim(layer, writer.lock());
  const auto room = [&](const Tensor& like) {
    return at::zeros({max_sequence_length, max_batch_size, like.size(2), like.size(3)},
                     like.options());
  };
  auto found = key_value_memory_dict.find(layer);
  if (found == key_value_memory_dict.end())
    found = key_value_memory_dict.emplace(layer, std::pair(room(key), room(value))).first;
  const bool is_recording = at::GradMode::is_enabled();
  bool is_constant = true;
  for (int64_t row = batch_size_offset; row < last; ++row) {
    const int64_t one = layer * max_batch_size + row;
    if (begin == 0) recorded_.erase(one);
    is_constant = is_constant && !recorded_.contains(one);
    if (is_recording && (key.requires_grad() || value.requires_grad())) recorded_.insert(one);
  }
  const auto kept = [&](Tensor& memory, const Tensor& fresh) {
    memory = writable(memory, fresh);
    const Tensor own = memory.narrow(1, batch_size_offset, batch);
    own.narrow(0, begin, length).copy_(fresh.detach());
    if (!is_recording) return own.narrow(0, 0, end).to(fresh.scalar_type());
    // Backward must not read memory that a later step writes, so the results are copies.
    const Tensor earlier = own.narrow(0, 0, begin).detach().to(fresh.scalar_type());
    const Tensor all = at::cat({earlier, fresh});
    // The hook lies on the graph of the new positions: a backward that computes the gradients of
    // chosen inputs only never reaches the earlier positions.
    if (!is_constant)
      (all.requires_grad() ? all : all.requires_grad_()).register_hook(refuse_gradient);
    return all;
  };
  return {kept(found->second.first, key), kept(found->second.second, value)};
}

void InferenceParams::claim(int64_t layer, const std::shared_ptr<const torch::nn::Module>& writer) {
  if (!writer) return;
  const auto memory = key_value_memory_dict.find(layer);
  const auto known = writers_.find(layer);
  if (memory != key_value_memory_dict.end() && known != writers_.end()) {
    const auto owner = known->second.lock();
    if (owner == writer) return;
    TORCH_CHECK_VALUE(!owner && sequence_len_offset == 0,
                      "InferenceParams: expected the layer that has written keys and values under ",
                      "layer_number ", layer, " before, got another one. Give each layer a ",
                      "layer_number of its own, and each model InferenceParams of its own.");
    key_value_memory_dict.erase(memory);
  }
  writers_[layer] = writer;
}

// MultiheadAttention.

MultiheadAttentionImpl::MultiheadAttentionImpl(int64_t hidden_size, int64_t num_attention_heads,
                                               const MultiheadAttentionOptions& own,
                                               const at::TensorOptions& options)
    : torch::nn::Module("MultiheadAttention"),
      options_(own.attention),
      returns_bias_(own.return_bias),
      returns_norm_(own.input_layernorm && own.return_layernorm_output) {
  using Mode = TensorParallel::Mode;
  const AttentionOptions& attention = options_;
  TensorParallel parallel = attention.tensor_parallel;
  const bool is_parallel = parallel.mode != Mode::none;
  const int64_t ranks = is_parallel ? parallel.size : 1;
  const auto shared = attention_heads(name(), hidden_size, num_attention_heads,
                                      attention.num_gqa_groups, attention.kv_channels, ranks);
  channels_ = shared.channels, heads_ = shared.heads, groups_ = shared.groups;
  check_window(name(), attention.window_size, attention.attn_mask_type);

  const int64_t query = ranks * heads_ * channels_, key = ranks * groups_ * channels_;
  const char* first = own.input_layernorm ? "layernorm_qkv" : "qkv";
  const auto main_grads = [&](const char* child) {
    return main_grads_of(name(), own.main_grads, child, {first, "proj"});
  };
  std::vector<std::pair<std::string, int64_t>> split;
  if (!attention.fuse_qkv_params) split = {{"query", query}, {"key", key}, {"value", key}};
  if (is_parallel) parallel.mode = Mode::column;
  if (own.input_layernorm) {
    projection_in_ = std::make_shared<LayerNormLinearImpl>(
        hidden_size, query + 2 * key,
        LayerNormLinearOptions{.eps = attention.layernorm_epsilon,
                               .normalization = attention.normalization,
                               .zero_centered_gamma = attention.zero_centered_gamma,
                               .bias = attention.bias,
                               .return_layernorm_output = own.return_layernorm_output,
                               .init_method = attention.init_method,
                               .tensor_parallel = parallel,
                               .parameters_split = split,
                               .main_grads = main_grads(first)},
        options);
  } else {
    projection_in_ =
        std::make_shared<LinearImpl>(hidden_size, query + 2 * key,
                                     LinearOptions{.bias = attention.bias,
                                                   .init_method = attention.init_method,
                                                   .tensor_parallel = parallel,
                                                   .parameters_split = split,
                                                   .main_grads = main_grads(first)},
                                     options);
  }
  register_module(first, projection_in_);
  const auto qk_norm = [&](const char* child) -> std::shared_ptr<OpModule> {
    const ops::NormOptions norm{.eps = attention.qk_norm_eps};
    switch (attention.qk_norm_type) {
      case QkNormType::none:
        return nullptr;
      case QkNormType::rms_norm:
        return register_module(
            child, std::make_shared<OpModule>("RMSNorm", ops::rms_norm(channels_, norm), options));
      case QkNormType::layer_norm:
        return register_module(child, std::make_shared<OpModule>(
                                          "LayerNorm", ops::layer_norm(channels_, norm), options));
      case QkNormType::l2_normalization:
        break;
    }
    return register_module(
        child, std::make_shared<OpModule>("L2Normalization",
                                          ops::l2_normalization({attention.qk_norm_eps}), options));
  };
  q_norm_ = qk_norm("q_norm");
  k_norm_ = qk_norm("k_norm");
  if (is_parallel) parallel.mode = Mode::row;
  projection_out_ = register_module(
      "proj", std::make_shared<LinearImpl>(
                  query, hidden_size,
                  LinearOptions{.bias = attention.bias,
                                .return_bias = own.return_bias,
                                .init_method = attention.output_layer_init_method,
                                .tensor_parallel = parallel,
                                .main_grads = main_grads("proj"),
                                // Without dropout, attention keeps its result for its own backward
                                // anyway.
                                .save_original_input = attention.attention_dropout == 0},
                  options));
}

MultiheadAttentionImpl::Heads MultiheadAttentionImpl::split(const Tensor& mixed) const {
  const int64_t per_group = heads_ / groups_;
  std::vector<Tensor> parts;
  if (options_.fuse_qkv_params && options_.qkv_weight_interleaved) {
    parts = mixed.unflatten(-1, {groups_, per_group + 2, channels_})
                .split_with_sizes({per_group, 1, 1}, -2);
    for (Tensor& part : parts) part = part.flatten(-3, -2);
  } else if (per_group == 1) {  // one view for all three
    parts = mixed.unflatten(-1, {3, heads_, channels_}).unbind(-3);
  } else {
    const int64_t query = heads_ * channels_, key = groups_ * channels_;
    parts = mixed.split_with_sizes({query, key, key}, -1);
    for (Tensor& part : parts) part = part.unflatten(-1, {-1, channels_});
  }
  return {parts[0], parts[1], parts[2]};
}

void MultiheadAttentionImpl::norm(Heads& heads) const {
  if (!q_norm_) return;
  heads.query = q_norm_->forward(heads.query);
  heads.key = k_norm_->forward(heads.key);
}

void MultiheadAttentionImpl::rotate(Heads& heads, const RotaryAngles& angles,
                                    int64_t offset) const {
  for (const auto& [t, freqs] : {std::pair(&heads.query, &angles.query), {&heads.key, &angles.key}})
    if (freqs->defined())
      *t = apply_rotary_pos_emb(*t, freqs->slice(0, offset), options_.qkv_format,
                                options_.rotary_pos_interleaved);
}

void MultiheadAttentionImpl::take_up(Heads& heads, InferenceParams& params) const {
  const bool is_sbhd = options_.qkv_format == QkvFormat::sbhd;
  const auto turned = [&](const Tensor& t) { return is_sbhd ? t : t.transpose(0, 1); };
  const auto [key, value] =
      params.step(*options_.layer_number, turned(heads.key), turned(heads.value), weak_from_this());
  heads.key = turned(key);
  heads.value = turned(value);
}

void MultiheadAttentionImpl::check_call(const AttentionArguments& arguments) const {
  const AttnMaskType type = mask_type(arguments);
  const Tensor& mask = arguments.attention_mask;
  TORCH_CHECK_VALUE(arguments.inference_params == nullptr || options_.layer_number, name(),
                    ": expected layer_number where inference_params are given, got None. Build ",
                    "each layer with its own.");
  TORCH_CHECK_VALUE(mask.defined() || !needs_mask(type), name(), ": expected an attention_mask ",
                    "with the mask type '", name_of(type),
                    "', got none. True in it leaves a position out.");
  TORCH_CHECK_VALUE(!mask.defined() || type != AttnMaskType::no_mask, name(),
                    ": expected no attention_mask with the mask type \"no_mask\", got one. Call ",
                    "with attn_mask_type=\"arbitrary\".");
  TORCH_CHECK_TYPE(!mask.defined() || mask.scalar_type() == at::kBool || mask.is_floating_point(),
                   name(), ": expected attention_mask to be a tensor of booleans, or of ",
                   "floating-point numbers that are added to the scores, got ", mask.scalar_type(),
                   ". Pass mask.to(at::kBool) where 1 leaves a position out, ",
                   "mask == 0 where 1 keeps it.");
}

Tensor MultiheadAttentionImpl::seen_or_added(const Tensor& mask, const Tensor& mixed,
                                             int64_t offset) const {
  const bool is_sbhd = options_.qkv_format == QkvFormat::sbhd;
  const int64_t length = mixed.size(is_sbhd ? 0 : 1);
  const std::array sizes{mixed.size(is_sbhd ? 1 : 0), heads_, length, offset + length};
  bool fits = mask.dim() <= 4;
  for (int64_t back = 1; fits && back <= mask.dim(); ++back)
    fits = mask.size(-back) == 1 || mask.size(-back) == sizes[static_cast<size_t>(4 - back)];
  TORCH_CHECK_VALUE(fits, name(), ": expected attention_mask that broadcasts to [batch, heads, ",
                    "positions, positions of keys] = ", at::IntArrayRef(sizes), ", got ",
                    mask.sizes(), ". Reshape it; positions of keys are those of earlier calls ",
                    "too.");
  Tensor whole = mask;
  while (whole.dim() < 4) whole = whole.unsqueeze(0);
  return mask.scalar_type() == at::kBool ? whole.logical_not() : whole.to(mixed.scalar_type());
}

Tensor MultiheadAttentionImpl::attend(const Heads& heads, std::optional<Tensor> mask,
                                      AttnMaskType type) const {
  const int64_t rows = heads.query.size(-2), columns = heads.key.size(-2);
  // Torch's causal mask aligns the first query and the first key; this module aligns the last ones.
  const bool has_own = is_causal(type) && (mask || rows != columns);
  if (has_own) {
    const Tensor causal =
        at::ones({rows, columns}, heads.query.options().dtype(at::kBool)).tril(columns - rows);
    if (!mask)
      mask = causal;
    else if (mask->scalar_type() == at::kBool)
      mask = *mask & causal;
    else
      mask = mask->masked_fill(causal.logical_not(), -std::numeric_limits<double>::infinity());
  }
  return at::scaled_dot_product_attention(
      heads.query, heads.key, heads.value, mask, is_training() ? options_.attention_dropout : 0.0,
      is_causal(type) && !has_own, /*scale=*/std::nullopt, /*enable_gqa=*/heads_ != groups_);
}

std::pair<Tensor, Tensor> MultiheadAttentionImpl::context(const Tensor& x,
                                                          const AttentionArguments& arguments) {
  check_call(arguments);
  const ModuleOutputs first = projection_in_->forward_all(x);
  Heads heads = split(first.y);
  InferenceParams* const params = arguments.inference_params;
  const int64_t offset = params != nullptr ? params->sequence_len_offset : 0;
  std::optional<Tensor> mask;
  if (arguments.attention_mask.defined())
    mask = seen_or_added(arguments.attention_mask, first.y, offset);
  if (options_.qk_norm_before_rope) norm(heads);
  rotate(heads, arguments.rotary_pos_emb, offset);
  if (!options_.qk_norm_before_rope) norm(heads);
  if (params != nullptr) take_up(heads, *params);
  const bool is_sbhd = options_.qkv_format == QkvFormat::sbhd;
  for (Tensor* t : {&heads.query, &heads.key, &heads.value})
    *t = is_sbhd ? t->permute({1, 2, 0, 3}) : t->transpose(1, 2);
  const Tensor y = attend(heads, std::move(mask), mask_type(arguments));
  return {(is_sbhd ? y.permute({2, 0, 1, 3}) : y.transpose(1, 2)).flatten(-2),
          first.layernorm_output};
}

ModuleOutputs MultiheadAttentionImpl::forward_all(const Tensor& x,
                                                  const AttentionArguments& arguments) {
  check_window(name(), arguments.window_size, mask_type(arguments));
  auto [attended, normed] = context(x, arguments);
  ModuleOutputs all = projection_out_->forward_all(attended);
  all.layernorm_output = std::move(normed);
  return all;
}

Tensor MultiheadAttentionImpl::forward(const Tensor& x, const AttentionArguments& arguments) {
  TORCH_CHECK_VALUE(!returns_bias_ && !returns_norm_, name(),
                    ": expected one output, got return_bias or return_layernorm_output. Call ",
                    "forward_all(x), which returns all of them.");
  return forward_all(x, arguments).y;
}

}  // namespace tandem
