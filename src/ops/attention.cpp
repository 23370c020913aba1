// The ops between the product that computes queries, keys and values and the product after
// attention.
#include "kernel_ops/attention/attention.h"

#include "core/call.h"
#include "core/op_def.h"
#include "kernel_ops/attention/qk_norm.h"
#include "kernel_ops/attention/rotary.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

constexpr double kMostHeads = 1 << 20;

template <typename T>
int64_t kv_heads(const T& options) {
  return static_cast<int64_t>(options.num_kv_heads != 0 ? options.num_kv_heads : options.num_heads);
}

void turn(Call& call, bool is_inverse) {
  enum Read { x, cosines, sines };
  const auto& options = call.options<RotaryOptions>();
  const size_t features =
      options.rotated_features != 0 ? options.rotated_features : options.head_dim;
  call.write<kernel_ops::Rotary>({.x = call.in(x),
                                  .cosines = options.tables ? call.maybe(cosines) : std::nullopt,
                                  .sines = options.tables ? call.maybe(sines) : std::nullopt,
                                  .num_heads = static_cast<int64_t>(options.num_heads),
                                  .num_kv_heads = kv_heads(options),
                                  .head_dim = static_cast<int64_t>(options.head_dim),
                                  .features = static_cast<int64_t>(features),
                                  .base = options.base,
                                  .interleaved = options.interleaved,
                                  .inverse = is_inverse});
}
void rotary_forward(Call& call) { turn(call, false); }
void rotary_backward(Call& call) { turn(call, true); }
size_t absent_tables(const void* options) {
  return static_cast<const RotaryOptions*>(options)->tables ? 0 : 2;
}

void attention_forward(Call& call) {
  enum Read { x, mask };
  const auto& options = call.options<AttentionOptions>();
  call.write<kernel_ops::AttentionForward>({.x = call.in(x),
                                            .mask = options.mask ? call.maybe(mask) : std::nullopt,
                                            .num_heads = static_cast<int64_t>(options.num_heads),
                                            .num_kv_heads = kv_heads(options),
                                            .head_dim = static_cast<int64_t>(options.head_dim),
                                            .is_causal = options.causal,
                                            .scale = options.scale,
                                            .soft_cap = options.soft_cap});
}

void attention_backward(Call& call) {
  enum Read { grad_y, x, y, logsumexp, mask };
  enum Write { grad_x, grad_mask };
  const auto& options = call.options<AttentionOptions>();
  call.write<kernel_ops::AttentionBackward>(
      {.grad_y = call.in(grad_y),
       .x = call.in(x),
       .y = call.in(y),
       .logsumexp = call.in(logsumexp),
       .mask = options.mask ? call.maybe(mask) : std::nullopt,
       .num_heads = static_cast<int64_t>(options.num_heads),
       .num_kv_heads = kv_heads(options),
       .head_dim = static_cast<int64_t>(options.head_dim),
       .is_causal = options.causal,
       .scale = options.scale,
       .soft_cap = options.soft_cap,
       .output_mask = {call.wants(grad_x), options.mask && call.wants(grad_mask)}});
}
size_t absent_masks(const void* options) {
  return static_cast<const AttentionOptions*>(options)->mask ? 0 : 1;
}

void qk_norm_forward(Call& call) {
  enum Read { x, query_weight, key_weight };
  const auto& options = call.options<QkNormOptions>();
  call.write<kernel_ops::QkNormForward>({.x = call.in(x),
                                         .query_weight = call.in(query_weight),
                                         .key_weight = call.in(key_weight),
                                         .num_heads = static_cast<int64_t>(options.num_heads),
                                         .num_kv_heads = kv_heads(options),
                                         .eps = options.eps,
                                         .zero_centered_gamma = options.zero_centered_gamma,
                                         .rounds_before_weight = options.rounds_before_weight});
}

void qk_norm_backward(Call& call) {
  enum Read { grad_y, x, query_weight, key_weight };
  const auto& options = call.options<QkNormOptions>();
  call.write<kernel_ops::QkNormBackward>({.grad_y = call.in(grad_y),
                                          .x = call.in(x),
                                          .query_weight = call.in(query_weight),
                                          .key_weight = call.in(key_weight),
                                          .num_heads = static_cast<int64_t>(options.num_heads),
                                          .num_kv_heads = kv_heads(options),
                                          .eps = options.eps,
                                          .zero_centered_gamma = options.zero_centered_gamma,
                                          .rounds_before_weight = options.rounds_before_weight,
                                          .output_mask = call.output_mask<3>()});
}

template <typename T>
Option<T> num_heads() {
  return {"num_heads", &T::num_heads, required(between(1, kMostHeads)), "heads of queries"};
}
template <typename T>
Option<T> head_dim() {
  return {"head_dim", &T::head_dim, required(between(1, kMostHeads)), "features of a head"};
}
template <typename T>
Option<T> num_kv_heads() {
  return {"num_kv_heads", &T::num_kv_heads, between(0, kMostHeads),
          "heads of keys and of values, which as many queries each share; 0: num_heads"};
}

}  // namespace

/// Rotates queries and keys by the angles of their positions, as kernel_ops::Rotary defines it.
/// Backward rotates the gradient by the opposite angles. It keeps nothing but tables, where the
/// caller passes them.
///
/// Shapes:  x as in kernel_ops::Heads -> y like x; with the option `tables` the extra inputs
///          cosines and sines as in kernel_ops::Rotary.
/// Dtypes:  y has the dtype of x, also under autocast.
/// Throws:  as kernel_ops::Rotary.
const OpDef kRotary{
    .name = "rotary",
    .formula =
        "y = [turned(q), turned(k), v], [q, k, v] = x; turned: (a cos - b sin, b cos + a "
        "sin) for pairs (a, b) of the features of a head, at the angle position "
        "base^(-2 pair / rotated_features)",
    .signature =
        {RotaryOptions{},
         {num_heads<RotaryOptions>(),
          head_dim<RotaryOptions>(),
          num_kv_heads<RotaryOptions>(),
          {"base", &RotaryOptions::base, at_least(1), "of the angles"},
          {"rotated_features", &RotaryOptions::rotated_features, between(0, kMostHeads),
           "how many features of a head are turned, the first ones; 0: all"},
          {"interleaved", &RotaryOptions::interleaved,
           "the features of a pair are neighbours; else they are half of what is turned apart"},
          {"tables", &RotaryOptions::tables,
           "cosines and sines of the angles of all features are extra inputs, "
           "[sequence, rotated_features] or what broadcasts to the heads of x; else positions are "
           "0, 1, ... along the last dimension but one"}}},
    .inputs = {"x", "cosines", "sines"},
    .absent_inputs = absent_tables,
    .indices = {"cosines", "sines"},
    .dtype = DtypeRule::promote,
    .forward = {{.name = "forward",
                 .reads = {"x", "cosines", "sines"},
                 .writes = {"y"},
                 .run = rotary_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "cosines", "sines"},
                  .writes = {"grad_x"},
                  .run = rotary_backward}},
    .context = {"cosines", "sines"},
};

/// Attention as kernel_ops::AttentionForward defines it. Backward recomputes the scores from x, y
/// and the logarithm of the sums.
///
/// Shapes:  x as in kernel_ops::Heads -> y [..., sequence, num_heads head_dim]; with the option
///          `mask` the extra input mask as in kernel_ops::AttentionForward.
/// Dtypes:  y has the dtype of autocast, else of x; a mask is not cast.
/// Throws:  as kernel_ops::AttentionForward.
const OpDef kAttention{
    .name = "attention",
    .formula = "y = softmax(scale q k^T (+ mask)) v, [q, k, v] = x, head by head",
    .signature =
        {AttentionOptions{},
         {num_heads<AttentionOptions>(),
          head_dim<AttentionOptions>(),
          num_kv_heads<AttentionOptions>(),
          {"causal", &AttentionOptions::causal, "no query sees keys behind it"},
          {"scale", &AttentionOptions::scale, at_least(0),
           "the factor of q k^T; 0: 1 / sqrt(head_dim)"},
          {"soft_cap", &AttentionOptions::soft_cap, at_least(0),
           "scores become soft_cap tanh(scores / soft_cap) before any mask, all of them in memory "
           "at once; 0: they stay"},
          {"mask", &AttentionOptions::mask,
           "a mask is an extra input that broadcasts to [..., num_heads, sequence, sequence]: "
           "booleans, true where a query sees a key, or numbers that are added to scores"}}},
    .inputs = {"x", "mask"},
    .absent_inputs = absent_masks,
    .masks = {"mask"},
    .results = {{"y"}, {"logsumexp", ResultDef::statistic}},
    .forward = {{.name = "forward",
                 .reads = {"x", "mask"},
                 .writes = {"y", "logsumexp"},
                 .run = attention_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "y", "logsumexp", "mask"},
                  .writes = {"grad_x", "grad_mask"},
                  .run = attention_backward}},
    .context = {"x", "y", "logsumexp", "mask"},
};

/// y = each head of queries and keys divided by its root mean square and multiplied by query_weight
/// or key_weight, as kernel_ops::QkNormForward defines it. The op stands before rotary. Backward
/// keeps x and recomputes the norms of heads.
///
/// Shapes:  x as in kernel_ops::Heads; query_weight, key_weight [head_dim] -> y like x.
/// Dtypes:  y, with its values, has the dtype of autocast, else of query_weight; arithmetic is
///          float32, or float64 where y is, and rounded once.
/// Error:   as kernel_ops::QkNormForward.
/// Throws:  as kernel_ops::QkNormForward.
/// Source:  as kernel_ops::QkNormForward.
const OpDef kQkNorm{
    .name = "qk_norm",
    .formula =
        "y = [normed(q) * query_weight, normed(k) * key_weight, v], [q, k, v] = x; normed: head / "
        "sqrt(mean(head^2) + eps)",
    .signature = {QkNormOptions{},
                  {num_heads<QkNormOptions>(),
                   num_kv_heads<QkNormOptions>(),
                   {"eps", &QkNormOptions::eps, at_least(0), "added inside the square root"},
                   {"zero_centered_gamma", &QkNormOptions::zero_centered_gamma,
                    "the factors are 1 + query_weight and 1 + key_weight"},
                   {"rounds_before_weight", &QkNormOptions::rounds_before_weight,
                    "head / sqrt(...) is rounded to the dtype of x before it is multiplied"}}},
    .sizes = {{"head_dim", "features of a head"}},
    .params = {{"query_weight", {"head_dim"}, ParamDef::Init::ones, "zero_centered_gamma"},
               {"key_weight", {"head_dim"}, ParamDef::Init::ones, "zero_centered_gamma"}},
    .dtype = DtypeRule::weight,
    .forward = {{.name = "forward",
                 .reads = {"x", "query_weight", "key_weight"},
                 .writes = {"y"},
                 .run = qk_norm_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "query_weight", "key_weight"},
                  .writes = {"grad_x", "grad_query_weight", "grad_key_weight"},
                  .run = qk_norm_backward}},
    .context = {"x"},
};

TANDEM_REGISTER_OP(kRotary);
TANDEM_REGISTER_OP(kAttention);
TANDEM_REGISTER_OP(kQkNorm);

}  // namespace tandem::ops
