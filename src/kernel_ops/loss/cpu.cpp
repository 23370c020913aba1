// The loss on the CPU. It computes some rows of logits at a time and overwrites them with their
// gradients.
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/loss/linear_cross_entropy.h"
#include "kernel_ops/product/product.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"

namespace tandem::kernel_ops {

namespace {

/// Rows of logits in memory at a time: as many as fill the memory of the gradient of the weight,
/// within limits between which products are fast (benchmarks/loss.py).
int64_t rows_at_once(const Tensor& weight) { return std::clamp<int64_t>(weight.size(1), 64, 512); }

/// The rows whose logits are computed: those that are not ignored, or all rows if `best` is wanted.
struct RowsOfLoss {
  std::vector<int64_t> places;
  /// By index among these rows, as the kernel takes them (kernels/cross_entropy.h).
  std::vector<int64_t> targets;
  std::vector<float> factors;
  /// The sum of the weights of the targets that this rank has.
  double total_weight = 0;
};

RowsOfLoss rows_of_loss(const LinearCrossEntropy::Args& args, const SharedClasses& shared,
                        const float* class_weight, bool all) {
  const Tensor of_targets = args.targets.contiguous();
  const Tensor of_factors = args.factors ? args.factors->to(at::kFloat).contiguous() : Tensor();
  const auto* const targets = of_targets.const_data_ptr<int64_t>();
  const int64_t own = LinearCrossEntropy::classes(args).expect_int(),
                before = shared.first[static_cast<size_t>(shared.rank)];
  RowsOfLoss rows;
  for (int64_t r = 0; r < of_targets.numel(); ++r) {
    const bool counts = targets[r] != args.ignore_index;
    if (counts) shared.check(targets[r], r, args.ignore_index);
    const bool is_own = targets[r] >= before && targets[r] - before < own;
    if (counts && is_own)
      rows.total_weight += class_weight == nullptr ? 1 : class_weight[targets[r] - before];
    if (!counts && !all) continue;
    rows.places.push_back(r);
    rows.targets.push_back(!counts ? -1 : is_own ? targets[r] - before : own);
    if (of_factors.defined()) rows.factors.push_back(of_factors.const_data_ptr<float>()[r]);
  }
  return rows;
}

/// The first rows of a matrix, and its transpose, viewed without a dispatch.
Tensor first_rows(const Tensor& matrix, int64_t count) {
  return at::native::as_strided_tensorimpl(matrix, {count, matrix.size(1)}, matrix.strides());
}
Tensor transposed(const Tensor& matrix) {
  return at::native::as_strided_tensorimpl(matrix, {matrix.size(1), matrix.size(0)},
                                           {matrix.stride(1), matrix.stride(0)});
}

kernels::Rows as_row(const Tensor& vector) {
  const auto size = static_cast<size_t>(vector.numel());
  return {vector.data_ptr(), element_of(vector.scalar_type()), 1, size, size};
}

/// The sums of each row over the classes of all ranks.
std::vector<kernels::cpu::LogitsSums> sums_of_all(const kernels::cpu::CrossEntropy& rows,
                                                  const SharedClasses& classes) {
  using kernels::cpu::LogitsSums;
  constexpr auto kNumbers = static_cast<int64_t>(sizeof(LogitsSums) / sizeof(double));
  const size_t count = rows.logits.rows;
  const Tensor own = empty_cpu({static_cast<int64_t>(count), kNumbers}, at::kDouble);
  kernels::cpu::logits_sums(rows, reinterpret_cast<LogitsSums*>(own.data_ptr()));
  const Tensor all = classes.gathered(own);
  const auto* next = reinterpret_cast<const LogitsSums*>(all.const_data_ptr());
  std::vector<LogitsSums> sums(next, next + count);
  for (size_t rank = 1; rank < classes.first.size(); ++rank) {
    next += count;
    for (size_t r = 0; r < count; ++r)
      sums[r] = joined(sums[r], next[r], static_cast<double>(classes.first[rank]));
  }
  return sums;
}

/// A gradient that is summed over pieces in float32 and rounded once to the dtype of `result`.
class SumOfPieces {
 public:
  /// An undefined result is not wanted.
  explicit SumOfPieces(const Tensor& result) : result_(result) {
    if (!result.defined()) return;
    sum_ = result.scalar_type() == at::kFloat ? result : empty_cpu(result.sizes(), at::kFloat);
  }
  explicit operator bool() const { return result_.defined(); }

  /// `write(tensor, adds)` writes the gradient of a piece into a tensor of the result's shape and
  /// of `dtype`, or adds to it if `adds`. `may_add`: whether `write` can add.
  template <typename Write>
  void add(at::ScalarType dtype, bool may_add, const Write& write) {
    if (dtype == at::kFloat && (may_add || is_empty_)) {
      write(sum_, !is_empty_);
    } else {
      if (!piece_.defined())
        piece_ = dtype == result_.scalar_type() && !sum_.is_same(result_)
                     ? result_
                     : empty_cpu(result_.sizes(), dtype);
      write(piece_, false);
      const kernels::Rows sum = as_row(sum_);
      kernels::cpu::add_bias(as_row(piece_), {}, is_empty_ ? kernels::Rows() : sum, sum);
    }
    is_empty_ = false;
  }
  void finish() {
    if (!result_.defined()) return;
    if (is_empty_) std::memset(result_.data_ptr(), 0, result_.nbytes());
    if (!is_empty_ && result_.scalar_type() != at::kFloat)
      kernels::cpu::add_bias(as_row(sum_), {}, {}, as_row(result_));
  }

 private:
  const Tensor& result_;
  Tensor sum_, piece_;
  bool is_empty_ = true;
};

}  // namespace

void LinearCrossEntropy::cpu(const Args& args, std::span<Tensor> results) {
  const RowsIn of_x(args.x);
  const kernels::ConstRows x = of_x;
  const Tensor class_weights =
      args.class_weight ? args.class_weight->to(at::kFloat).contiguous() : Tensor();
  const float* const class_weight =
      class_weights.defined() ? class_weights.const_data_ptr<float>() : nullptr;
  const SharedClasses shared(args);
  // Without a weight the logits are there, and a row without a loss has a gradient of zeros.
  RowsOfLoss rows =
      rows_of_loss(args, shared, class_weight, results[best].defined() || !args.weight);
  const auto count = static_cast<int64_t>(rows.places.size());
  const int64_t hidden = args.x.size(-1);
  const at::ScalarType dtype = logits_dtype(args);
  const VectorIn bias(args.bias);
  const size_t bytes = x.cols * kernels::bytes_per_element(x.element);

  std::vector<float> losses(x.rows);
  SumOfPieces of_weight(results[grad_weight]), of_bias(results[grad_bias]);
  const Tensor of_rows = results[grad_x];

  /// Computes the losses of rows from `first` on, and their gradients unless `gradients` is empty.
  const auto compute = [&](const kernels::ConstRows& logits, int64_t first,
                           const kernels::Rows& gradients) {
    std::vector<float> some(logits.rows);
    std::vector<int64_t> bests(results[best].defined() ? logits.rows : 0);
    kernels::cpu::CrossEntropy loss{
        .logits = logits,
        .bias = bias,
        .targets = rows.targets.data() + first,
        .class_weight = class_weight,
        .factors = rows.factors.empty() ? nullptr : rows.factors.data() + first,
        .options = {args.label_smoothing, args.soft_cap, args.z_loss},
        .best = bests.empty() ? nullptr : bests.data()};
    std::vector<kernels::cpu::LogitsSums> sums;
    if (shared.are_shared()) sums = sums_of_all(loss, shared);
    const kernels::cpu::ClassShard shard{static_cast<double>(shared.all), shared.all_weights,
                                         sums.data()};
    if (shared.are_shared()) loss.shard = &shard;
    loss.losses = some.data();
    loss.gradients = gradients;
    kernels::cpu::cross_entropy(loss);
    for (size_t r = 0; r < some.size(); ++r) {
      const auto place = static_cast<size_t>(rows.places[static_cast<size_t>(first) + r]);
      losses[place] = some[r];
      if (!bests.empty()) results[best].data_ptr<int64_t>()[place] = bests[r];
    }
  };

  if (!args.weight) {
    if (x.rows != 0) compute(x, 0, of_rows.defined() ? rows_out(of_rows) : kernels::Rows());
  } else {
    const Tensor& weight = *args.weight;
    const Tensor turned = transposed(weight);
    if (of_rows.defined() && count != static_cast<int64_t>(x.rows))
      std::memset(of_rows.data_ptr(), 0, of_rows.nbytes());
    const bool wants_gradient = of_rows.defined() || of_weight || of_bias;
    const int64_t most = std::min(count, rows_at_once(weight));
    const Tensor inputs = empty_cpu({most, hidden}, dtype),
                 // Not from the cache, which would hold them during the rest of backward.
        logits = at::empty({most, weight.size(0)}, weight.options()),
                 of_inputs = of_rows.defined() ? empty_cpu({most, hidden}, of_rows.scalar_type())
                                               : Tensor();
    for (int64_t first = 0; first < count; first += most) {
      const int64_t some = std::min(most, count - first);
      const auto* const places = rows.places.data() + first;
      const Tensor from = first_rows(inputs, some), z = first_rows(logits, some);
      for (int64_t r = 0; r < some; ++r)
        std::memcpy(static_cast<char*>(from.data_ptr()) + static_cast<size_t>(r) * bytes,
                    static_cast<const char*>(x.data) + static_cast<size_t>(places[r]) * x.stride *
                                                           (bytes / std::max<size_t>(1, x.cols)),
                    bytes);
      multiply(Product(from, turned, dtype), z);
      const kernels::Rows of_z = rows_out(z);
      compute(of_z, first, wants_gradient ? of_z : kernels::Rows());
      if (of_rows.defined()) {
        const Tensor to = first_rows(of_inputs, some);
        multiply(Product(z, weight, to.scalar_type()), to);
        const size_t size = static_cast<size_t>(hidden) * of_rows.element_size();
        for (int64_t r = 0; r < some; ++r)
          std::memcpy(
              static_cast<char*>(of_rows.data_ptr()) + static_cast<size_t>(places[r]) * size,
              static_cast<const char*>(to.const_data_ptr()) + static_cast<size_t>(r) * size, size);
      }
      if (of_weight) {
        const Tensor turned_z = transposed(z);
        // The sum over many rows may overflow float16.
        const at::ScalarType of_piece = dtype == at::kHalf ? at::kFloat : dtype;
        of_weight.add(of_piece, /*may_add=*/true, [&](const Tensor& to, bool adds) {
          multiply(Product(turned_z, from, of_piece,
                           {.rows = kernel_ops::Rows::contracted, .beta = adds ? 1.0 : 0.0}),
                   to);
        });
      }
      if (of_bias)
        of_bias.add(at::kFloat, /*may_add=*/false,
                    [&](const Tensor& to, bool) { kernels::cpu::sum_rows(of_z, vector_out(to)); });
    }
  }
  of_weight.finish();
  of_bias.finish();
  if (shared.are_shared()) rows.total_weight = shared.sum(rows.total_weight);
  if (results[denominator].defined())
    *results[denominator].data_ptr<float>() = static_cast<float>(rows.total_weight);
  if (!results[y].defined()) return;
  auto* const to = results[y].data_ptr<float>();
  if (args.reduction == "none") {
    std::copy(losses.begin(), losses.end(), to);
    return;
  }
  double sum = 0;
  for (const float loss : losses) sum += loss;
  *to = static_cast<float>(args.reduction == "sum" ? sum : sum / rows.total_weight);
}

}  // namespace tandem::kernel_ops
