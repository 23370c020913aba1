// Descriptions: everything a plan depends on that is no property of a tensor, as JSON that the
// fronts have written here.
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

/// An extra input or output of an op: bound to a channel, or an argument or result of the pipeline.
struct Binding {
  /// Empty where unbound.
  std::string channel;
  /// Outputs: returned as well.
  bool to_caller = true;
};

/// Where the slots of what is quantized for an op stand: in the state of which module, from which
/// one on.
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
  /// How many of `params` are each parameter of the op, one behind the other along the first
  /// dimension; empty: one each.
  std::vector<uint32_t> joins;
  /// Positions in its list of buffers.
  std::vector<uint32_t> buffers;
  std::vector<Binding> extra_inputs, extra_outputs;
  bool in_place = false;
  /// in_place on a caller's tensor is a command; on a channel's value it is a permission that
  /// nobody needs to use.
  bool writes_caller() const {
    return in_place && kind->def.in_place && extra_inputs[0].channel.empty();
  }
  std::optional<StateSlots> state;
  /// Backward makes again what its forward makes, rather than keep it.
  bool recompute = false;
  /// What a front knows the op by; user fusions over op lists look at it.
  std::string instance;
};

/// A run of ops that a user's fusion function has fused: ops [first, last].
struct OpGroup {
  size_t first = 0, last = 0;
  std::shared_ptr<const Fusion> fusion;
  Options options;
  /// Why its own rule has refused it: then it is told, and nothing else.
  Refusal refusal = std::nullopt;
};

/// What a description must carry to be read by this library, where it carries a version at all.
inline constexpr uint64_t kDescriptionVersion = 1;

/// How ops are planned.
struct PlanningTerms {
  bool training = true;
  /// False: no fusion at all, what `verify` compares with.
  bool fuse = true;
  /// Workspaces are passed in for the codes of weights.
  bool cache_weights = false;
  /// By name: `verify` bisects with it.
  std::vector<std::string> skipped_fusions = {};
  /// An error with the reason where one of these is not made.
  std::vector<std::string> required_fusions = {};
  /// Of the registered user fusions.
  uint64_t fusions_version = 0;
  /// Not 0: each quantization is a step of its own that says what it does, under this number
  /// (quantization/inspection.h).
  int64_t watched = 0;
  /// Bytes that forward may keep for backward, per row of the main input: numel(x) / size(-1) rows.
  std::optional<double> memory_budget = std::nullopt;
};

struct Description : PlanningTerms {
  std::vector<OpNode> ops;
  /// Of ops whose front made them by name.
  std::vector<std::shared_ptr<const OpKind>> kinds;
  std::optional<Recipe> recipe;
  SizesInKey sizes_in_key = SizesInKey::none;

  /// Whether any op is to be computed again in backward.
  bool recomputes() const;
  size_t param_count() const;
  size_t buffer_count() const;
  /// Ops whose extra inputs come from the caller, in order of ops then slots.
  size_t extra_input_count() const;
};

/// Reads a description, which may come from anywhere, and resolves its channels. Throws
/// c10::ValueError on what is no JSON or exceeds `limits` (core/json_fields.h), on another version
/// or build than this library's, on unknown fields and ops, wrong types and options, parameter
/// positions that do not fit the op, and on channels with several producers, no producer, or no
/// earlier one.
std::shared_ptr<const Description> parse_description(std::string_view json);

/// An op as a front names it, before anything is looked up.
struct OpEntry {
  std::string op;
  /// Instead of `op` to people; empty: `op`.
  std::string label = {};
  /// As JSON.
  std::string options = "{}";
  std::vector<size_t> params = {}, joins = {}, buffers = {};
  /// One per slot, or none at all where all are unbound.
  std::vector<Binding> extra_inputs = {}, extra_outputs = {};
  bool in_place = false;
  std::optional<StateSlots> state = std::nullopt;
  std::string instance = {};
  bool recompute = false;
};

/// Throws c10::ValueError unless a budget is finite and not negative.
TANDEM_API void check_memory_budget(double bytes_per_row);

/// The ops of a description. Throws c10::ValueError where options are no JSON, and where a channel
/// is not named in UTF-8, which JSON cannot hold.
TANDEM_API std::string write_ops(const std::vector<OpEntry>& ops);

/// The description of ops (write_ops) under a recipe, as JSON, that parse_description reads. A
/// process is named where the description must not be found by another one.
TANDEM_API std::string write_description(std::string_view ops, std::string_view recipe,
                                         const PlanningTerms& terms,
                                         const std::string& process = {});

}  // namespace tandem
