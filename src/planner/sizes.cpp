#include "planner/sizes.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

#include "core/call.h"
#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "planner/glue.h"
#include "quantization/formats/format.h"

namespace tandem {

namespace {

/// Two numbers of rows, multiples of every block of a format. The difference between both
/// measurements is what grows with rows.
constexpr int64_t kFewRows = 1024, kManyRows = 2048;

/// Hides the steps that run here from modes, transforms and tracers of this thread.
class Unseen {
 public:
  Unseen()
      : keys_(c10::default_included_set,
              c10::default_excluded_set | c10::autograd_dispatch_keyset |
                  c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::InferenceMode no_inference_{false};
  c10::NoGradGuard no_grad_;
};

/// Whether a first size is ambiguous: it grows with the main input's, and the argument has another
/// number of dimensions, so it may be rows or a number of features.
bool may_be_rows(const std::vector<int64_t>& sizes, const std::vector<int64_t>& x) {
  return !sizes.empty() && sizes[0] < 0 && sizes.size() != x.size();
}

class Measurement {
 public:
  /// `grows`: one bit per argument with an ambiguous first size, in their order; set if it is rows,
  /// not set if it is broadcast features.
  Measurement(const Description& description, const Draft& draft, const PlanKey& key, int64_t rows,
              uint64_t grows)
      : description_(description),
        draft_(draft),
        slot_of_(slots_of(draft)),
        frame_(Path::dispatch, draft.types, slot_of_, slots_) {
    frame_.reserve_side_values(draft.types.size(), draft.types.size());
    const auto sizes = key.sizes();
    int64_t all_rows = rows;
    for (size_t d = 1; d + 1 < sizes[0].size(); ++d) all_rows *= sizes[0][d];
    for (size_t i = 0; i < draft.inputs.size() + draft.params.size(); ++i) {
      const Value value =
          i < draft.inputs.size() ? draft.inputs[i] : draft.params[i - draft.inputs.size()];
      std::vector<int64_t> own = sizes[i];
      const bool is_unclear = may_be_rows(own, sizes[0]);
      if (!own.empty() && own[0] < 0) {
        const bool is_first = own[0] == PlanKey::kGrowsAsFirst;
        own[0] = is_unclear && (grows & 1) == 0 ? 1  // broadcast features, whatever their number
                 : is_first                     ? rows
                                                : all_rows;
      }
      if (is_unclear) grows >>= 1;
      frame_.tensor(value) = empty(own, draft.dtype(value));
    }
    for (size_t i = 0; i < key.codes_count(); ++i) {
      const auto traits = key.codes(i);
      const size_t inputs = draft.inputs.size();
      const at::Tensor& numbers =
          frame_.tensor(traits.tensor < inputs ? draft.inputs[traits.tensor]
                                               : draft.params[traits.tensor - inputs]);
      put_codes(numbers, *traits.quantizer, draft.argument_codes[2 * i],
                draft.argument_codes[2 * i + 1]);
    }
    const at::Tensor& x = frame_.tensor(draft.inputs[0]);
    rows_ = x.dim() == 0 || x.size(-1) == 0 ? 1 : x.numel() / x.size(-1);
  }

  /// The bytes of all values and the operations of all steps, for `rows()` rows.
  PerRow run() {
    PerRow all;
    for (const Step& step : draft_.forward) {
      run(Step(step));  // a copy, so that `taken` of the plan's step does not change
      all.flops.push_back(flops_of(step));
    }
    for (size_t v = 0; v < draft_.types.size(); ++v) {
      int64_t bytes = 0;
      if (tensors_per_value(draft_.types[v]) != 0)
        for (const at::Tensor& tensor : frame_.tensors(static_cast<Value>(v)))
          if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
      all.bytes.push_back(static_cast<double>(bytes));
    }
    return all;
  }

  int64_t rows() const { return rows_; }

 private:
  std::vector<uint32_t> slots_of(const Draft& draft) {
    std::vector<uint32_t> slots;
    for (size_t v = 0; v < draft.types.size(); ++v) {
      const size_t count = tensors_per_value(draft.types[v]);
      slots.push_back(
          static_cast<uint32_t>(count == 0 ? v : slots_));  // without tensors: the value's number
      slots_ += count;
    }
    return slots;
  }

  static at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(dtype));
  }

  static std::optional<at::Tensor> given_for(const Quantizer& quantizer) {
    const Given given = given_to(quantizer);
    if (given == Given::nothing) return std::nullopt;
    return empty({}, given == Given::seed ? at::kLong : at::kFloat);
  }

  void put_codes(const at::Tensor& x, const Quantizer& quantizer, Value row, Value column) {
    const auto group = kernel_ops::dispatch<kernel_ops::Quantize>(
        {.x = x,
         .given = given_for(quantizer),
         .quantizer = quantizer,
         .output_mask = {exists(row), exists(column), false}});
    for (const Value value : {row, column}) {
      if (!exists(value)) continue;
      const Direction direction = value == row ? Direction::row : Direction::column;
      for (size_t part = 0; part < tensors_per_value(frame_.type(value)); ++part)
        frame_.tensor(value, part) = group[part_of(direction, part)];
      if (is_packed(quantizer)) frame_.note_sizes(value, kernel_ops::sizes_of(x));
    }
  }

  void run(const Step& step) {
    switch (step.kind) {
      case StepKind::seed:
        frame_.tensor(step.writes[0]) = empty({}, at::kLong);
        return;
      case StepKind::take_scale:
        if (exists(step.writes[0])) frame_.tensor(step.writes[0]) = empty({}, at::kFloat);
        return;
      case StepKind::record_amax:
        return;
      case StepKind::refresh: {
        const auto [quantizer, pieces] = weight_of_step(step);
        std::vector<at::Tensor> weight;
        for (const Value piece : pieces) weight.push_back(frame_.tensor(piece));
        return put_codes(kernel_ops::joined(weight, /*may_view=*/false), *quantizer, step.writes[0],
                         step.writes[1]);
      }
      default:
        break;
    }
    if (step.runs_user_code) return assume_width(step);
    try {
      Call call(frame_, step);
      step.run(call);
    } catch (const std::exception& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "memory_budget: expected steps that run on the meta ",
                                  "device, where sizes come from, got ", step.name, ": ",
                                  error.what(), ". Leave the budget out.");
    }
  }

  void assume_width(const Step& step) {
    const at::Tensor& x = frame_.tensor(step.reads[0]);
    for (const Value value : step.writes)
      if (exists(value) && draft_.types[index_of(value)].format == Format::plain)
        frame_.tensor(value) = empty(x.sizes(), draft_.dtype(value));
  }

  /// Operations of the products that a step covers: two for each element of x and row of the
  /// weight.
  double flops_of(const Step& step) {
    double flops = 0;
    for (const Part& part : step.covers) {
      const OpKind& op = draft_.operands[part.op].kind();
      const bool is_product =
          part.nth < op.forward.size() && !op.forward[part.nth].contracts.empty();
      const OpNode& node = description_.ops[part.op];
      if (!is_product || node.params.empty() || !exists(step.reads[0])) continue;
      const at::Tensor& x = frame_.tensor(step.reads[0]);
      const size_t tensors = node.joins.empty() ? 1 : node.joins[0];
      for (size_t i = 0; i < tensors; ++i) {
        const at::Tensor& weight = frame_.tensor(draft_.params[node.params[i]]);
        if (x.defined() && weight.dim() == 2)
          flops += 2.0 * static_cast<double>(x.numel()) * static_cast<double>(weight.size(0));
      }
    }
    return flops;
  }

  const Description& description_;
  const Draft& draft_;
  size_t slots_ = 0;
  std::vector<uint32_t> slot_of_;
  Frame frame_;
  int64_t rows_ = 1;
};

bool has_rows(const PlanKey& key) {
  const auto sizes = key.sizes();
  return !sizes.empty() && !sizes[0].empty() && sizes[0][0] == PlanKey::kGrowsAsFirst;
}

/// By value: whether it depends on the numbers of an input. Values of parameters alone, and seeds,
/// have no rows.
std::vector<bool> values_behind_inputs(const Draft& draft) {
  std::vector<bool> behind(draft.types.size());
  for (const Value input : draft.inputs) behind[index_of(input)] = true;
  const auto is_behind = [&](Value value) { return exists(value) && behind[index_of(value)]; };
  for (const Step& step : draft.forward)
    if (step.kind != StepKind::seed && std::ranges::any_of(step.reads, is_behind))
      for (const Value value : step.writes)
        if (exists(value)) behind[index_of(value)] = true;
  return behind;
}

PerRow measured(const Description& description, const PlanKey& key, const Draft& draft,
                uint64_t grows) {
  Measurement few(description, draft, key, kFewRows, grows);
  PerRow result = few.run();
  double rows = static_cast<double>(few.rows());
  if (has_rows(key)) {
    Measurement many(description, draft, key, kManyRows, grows);
    const PerRow more = many.run();
    rows = static_cast<double>(many.rows() - few.rows());
    std::ranges::transform(more.bytes, result.bytes, result.bytes.begin(), std::minus());
    std::ranges::transform(more.flops, result.flops, result.flops.begin(), std::minus());
  } else {
    const std::vector<bool> behind = values_behind_inputs(draft);
    for (size_t v = 0; v < result.bytes.size(); ++v)
      if (!behind[v]) result.bytes[v] = 0;
  }
  // Avoids a division by zero if there are no rows.
  for (auto* list : {&result.bytes, &result.flops})
    for (double& number : *list) number /= std::max(rows, 1.0);
  return result;
}

}  // namespace

PerRow measure(const Description& description, const PlanKey& key, const Draft& draft) {
  const Unseen unseen;
  TORCH_INTERNAL_ASSERT(key.sizes().size() == draft.inputs.size() + draft.params.size(),
                        "a plan within a memory budget needs the sizes of all arguments");
  const auto sizes = key.sizes();
  const auto unclear = static_cast<int>(
      std::ranges::count_if(sizes, [&](const auto& own) { return may_be_rows(own, sizes[0]); }));
  // Tries all as rows, then with some or all of them as features. Few pipelines have more than two.
  constexpr int kMostTried = 6;
  const uint64_t all = (uint64_t{1} << std::min(unclear, kMostTried)) - 1;
  for (uint64_t dropped = 0;; ++dropped) try {
      return measured(description, key, draft, ~dropped);
    } catch (const c10::NotImplementedError&) {
      if (dropped >= all) throw;
    }
}

}  // namespace tandem
