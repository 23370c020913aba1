// Descriptions: everything that a plan depends on and that is no property of a tensor. The fronts
// write them as JSON with the functions below.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/fusion.h"
#include "core/op_def.h"
#include "planner/key.h"
#include "quantization/recipe.h"

namespace tandem {

/// Where an extra input comes from or an extra output goes: a channel, or the caller.
struct Binding {
  /// The name of the channel; empty if the caller passes or gets the tensor.
  std::string channel;
  /// Of an output: whether the caller gets it too.
  bool to_caller = true;
};

/// Which slots of a recipe's state an op uses: the module that holds the state, and the first slot
/// of each direction.
struct StateSlots {
  uint32_t holder = 0, forward = 0, backward = 0;
};

/// An op of a pipeline with its bindings.
struct OpNode {
  const OpKind* kind = nullptr;
  Options options;
  /// "2.swiglu", as `explain` and errors name it.
  std::string label;
  /// Positions in the pipeline's parameter list.
  std::vector<uint32_t> params;
  /// For each parameter of the op, how many tensors of `params` it consists of, joined along the
  /// first dimension. Empty: each parameter is one tensor.
  std::vector<uint32_t> joins;
  /// Positions in the pipeline's list of buffers.
  std::vector<uint32_t> buffers;
  std::vector<Binding> extra_inputs, extra_outputs;
  bool in_place = false;
  /// Whether the op writes into a tensor of the caller. `in_place` demands that only for an extra
  /// input that the caller passes; for a channel's value it is a permission.
  bool writes_caller() const {
    return in_place && kind->def.in_place && extra_inputs[0].channel.empty();
  }
  std::optional<StateSlots> state;
  /// Whether backward recomputes the op's results instead of having them kept.
  bool recompute = false;
  /// Whether a norm or an activation computes in the dtype of x, whatever torch.autocast and the
  /// dtypes of its parameters say.
  bool keeps_dtype = false;
  /// The front's own name of the op; user fusions over op lists read it.
  std::string instance;
};

/// A run of ops that a user's fusion function has fused: ops [first, last].
struct OpGroup {
  size_t first = 0, last = 0;
  std::shared_ptr<const Fusion> fusion;
  Options options;
  /// Why the fusion's own rule refused the group. A refused group is only noted for `explain`.
  Refusal refusal = std::nullopt;
};

/// The version that a description must have if it carries one.
inline constexpr uint64_t kDescriptionVersion = 1;

/// How ops are planned.
struct PlanningTerms {
  bool training = true;
  /// False: no fusion is made; `verify` compares with such a plan.
  bool fuse = true;
  /// Whether the caller passes workspaces for the codes of weights.
  bool cache_weights = false;
  /// Names of fusions that are not made; `verify` bisects with this list.
  std::vector<std::string> skipped_fusions = {};
  /// Names of fusions without which planning throws, with the reason why one was not made.
  std::vector<std::string> required_fusions = {};
  /// The version of the registered user fusions (registry.h).
  uint64_t fusions_version = 0;
  /// Not 0: each quantization is a step of its own that reports what it loses, under this number
  /// (quantization/inspection.h).
  int64_t watched = 0;
  /// Bytes that forward may keep for backward, per row of the main input: numel(x) / size(-1) rows.
  std::optional<double> memory_budget = std::nullopt;
};

struct Description : PlanningTerms {
  std::vector<OpNode> ops;
  /// Kinds of ops that are not registered: the front created them by name.
  std::vector<std::shared_ptr<const OpKind>> kinds;
  std::optional<Recipe> recipe;
  SizesInKey sizes_in_key = SizesInKey::none;

  /// Whether backward recomputes any op.
  bool recomputes() const;
  size_t param_count() const;
  size_t buffer_count() const;
  /// How many extra inputs the caller passes.
  size_t extra_input_count() const;
};

/// Reads a description of unknown origin and resolves its channels.
///
/// Throws: c10::ValueError on text that is no JSON or exceeds `limits` (core/json_fields.h), on a
///         version or build that is not this library's, on unknown fields and ops, wrong types and
///         options, parameter positions that do not fit the op, and on a channel with several
///         producers, no producer, or none before its reader.
std::shared_ptr<const Description> parse_description(std::string_view json);

/// An op as a front describes it; no name is resolved yet.
struct OpEntry {
  std::string op;
  /// The name in `explain` and errors; empty: `op`.
  std::string label = {};
  OptionValues options = {};
  std::vector<size_t> params = {}, joins = {};
  /// The parameters, as positions in the pipeline's list, whose gradient backward adds to a
  /// main_grad.
  std::vector<size_t> main_grads = {};
  /// How many tensors backward leaves for gradients that are computed later, and how many tensors
  /// of the caller the op writes.
  size_t deferred = 0, given = 0;
  /// One binding per slot; empty if no slot is bound.
  std::vector<Binding> extra_inputs = {}, extra_outputs = {};
  bool in_place = false;
  std::optional<StateSlots> state = std::nullopt;
  std::string instance = {};
  bool recompute = false, keeps_dtype = false;
};

/// Throws: c10::ValueError unless the budget is finite and not negative.
TANDEM_API void check_memory_budget(double bytes_per_row);

/// The ops of a description as JSON. The buffers of the pipeline are the main_grads, one for each
/// parameter that an op names, in the order of the ops; then the deferred tensors of each op; then
/// its given tensors.
///
/// Throws: c10::ValueError for a text that is not UTF-8, a number that is not finite, an option
///         that is given twice, and for a main_grad of a parameter that is several tensors.
TANDEM_API std::string write_ops(const std::vector<OpEntry>& ops);

/// The description of `ops` (from write_ops) under a recipe, as JSON for parse_description. Pass a
/// `process` if caches must not find the description in another process.
TANDEM_API std::string write_description(std::string_view ops, std::string_view recipe,
                                         const PlanningTerms& terms,
                                         const std::string& process = {});

}  // namespace tandem
