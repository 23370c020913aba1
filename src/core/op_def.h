// Op definitions: one table entry per kind of operation. The planner knows of an op only what its
// entry declares.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_fwd.h"
#include "core/signature.h"
#include "core/value.h"
#include "tandem/export.h"

namespace tandem {

class Call;

/// Runs one step: reads the operands from the call, and writes the demanded results.
using Run = void (*)(Call& call);

/// Names of operands, in the order in which a step sees them. A gradient is named grad_<name>. A
/// name that ends in [] is a list, whose length depends on the op's options; lists come last in the
/// reads and writes of a step.
using Names = std::vector<std::string_view>;

/// The dtype in which an op computes and returns its results.
enum class DtypeRule : uint8_t {
  /// The dtype of autocast, else of the first parameter, as for products and norms.
  weight,
  /// The dtype of autocast, else of the input, as for activations.
  input,
  /// The dtype to which torch promotes the operands, as for sums.
  promote,
  /// The dtype to which torch promotes the input with a fractional number, which turns integers
  /// into the default dtype.
  promote_number,
};

/// A result of an op.
struct ResultDef {
  enum Kind : uint8_t {
    /// Has the op's dtype.
    computed,
    /// Is float32, or float64 where the op's dtype is.
    statistic,
    /// Has the op's dtype, but float32 instead of float16, because it is a sum over rows that may
    /// be large.
    large,
    /// Is an int64 that is drawn before the op runs, in the order of the list.
    seed,
    /// Holds the sizes of the input.
    shape,
    /// Holds what user code saved.
    opaque,
  };
  std::string_view name;
  Kind kind = computed;
  /// The fixed dtype of a computed result; Undefined: the op's dtype.
  at::ScalarType dtype = at::ScalarType::Undefined;
};

/// Declares that a result, or the gradient of an operand, is another value: `name` renames
/// `operand`, and no step runs.
struct Same {
  std::string_view name, operand;
};

/// The part of a collective that a step is: one step starts it, another one waits for it, and other
/// steps may run between them.
enum class Phase : uint8_t { start, compute, wait };

/// An operand of a product in a step, and the dimension over which the product sums. A recipe
/// quantizes the operand in blocks along this dimension.
struct Contract {
  std::string_view operand;
  Direction along;
  /// Whether a step of an op with these options reads numbers and quantizes them itself, in groups
  /// with scales of their own; nullptr: never.
  bool (*by_group)(const void* options) = nullptr;
  /// Whether backward of an op with these options quantizes the operand once more from its numbers,
  /// so that no codes are kept; nullptr: never.
  bool (*keeps_numbers)(const void* options) = nullptr;
};

/// One step of an op, in forward or backward. It runs if one of its writes is demanded, or if it
/// mutates a tensor that does not belong to the library.
struct StepDef {
  /// "forward", "backward", or the step's result where an op has several steps.
  std::string_view name;
  /// Names of operands and results; grad_<result> for gradients.
  Names reads;
  /// Names of results. In backward, grad_<operand> for gradients, then results that the step can
  /// re-emit (`reemits`).
  Names writes;
  /// Names of buffers, or of an extra input that the user lets the op overwrite.
  Names mutates = {};
  /// Gradients of parameters that the step writes only into the tensors that it mutates. The step
  /// runs where one of these gradients is requested.
  Names absorbs = {};
  /// Operands that a recipe may quantize. Each needs a role.
  std::vector<Contract> contracts = {};
  Phase phase = Phase::compute;
  /// A backward step that re-emits results for a later step and reads no gradient. The library adds
  /// a gradient as its last read, "behind", so that a compiler does not merge the step with
  /// forward's.
  bool writes_again = false;
  Run run = nullptr;
  /// Whether an op with these options has the step; nullptr: always.
  bool (*applies)(const void* options) = nullptr;
};

/// The role of an operand in the products whose steps name it in `contracts`.
struct RoleOf {
  std::string_view operand;
  Role role;
};

/// An op as data. Its only behaviour is the functions of its steps.
struct OpDef {
  std::string_view name;
  std::string_view formula;
  /// A name for patterns to match instead of the op's name, or empty. The ops of a family have one
  /// struct of options, and steps with equal names, reads and writes.
  std::string_view family = {};
  /// The options.
  Signature signature = {};
  /// Sizes from which the shapes of `params` are built.
  std::vector<SizeDef> sizes = {};
  /// The main operand, then the extra inputs.
  Names inputs = {"x"};
  /// How many of the last inputs are absent with these options; nullptr: none.
  size_t (*absent_inputs)(const void* options) = nullptr;
  /// Extra inputs such as counts, indices or angles, which are never cast and have no gradient.
  Names indices = {};
  /// Extra inputs that steps read in their own dtype: booleans, or numbers to add to scores.
  Names masks = {};
  std::vector<ParamDef> params = {};
  /// How many of the last `params` have no gradient and no influence on dtypes.
  size_t fixed_params = 0;
  /// Tensors of the caller that steps mutate; each call passes them.
  Names buffers = {};
  /// The main output first.
  std::vector<ResultDef> results = {{"y"}};
  /// Results that are outputs beside the main one.
  Names extra_outputs = {};
  /// Values that one backward step writes for another one.
  Names temporaries = {};
  DtypeRule dtype = DtypeRule::input;
  /// Results that are operands.
  std::vector<Same> same = {};
  /// Gradients of operands that are gradients of results.
  std::vector<Same> same_gradients = {};
  std::vector<RoleOf> roles = {};
  std::vector<StepDef> forward = {};
  std::vector<StepDef> backward = {};
  /// Results that a backward step can re-emit from its reads.
  Names reemits = {};
  /// Operands that a backward step reads only to re-emit results.
  Names reemit_reads = {};
  /// The values of Python's `saved_tensors`, in order.
  Names context = {};
  /// y is a reshape of x, and may share the memory of x.
  bool views_input = false;
  /// y may be larger than x, which the op then broadcasts.
  bool broadcasts_input = false;
  /// The step that replaces `forward` where the user lets the op overwrite the extra input: it
  /// writes y into this tensor, which it mutates.
  std::optional<StepDef> in_place = {};
  /// The op runs like the body of a torch.autograd.Function, and its values are never reused.
  bool runs_user_code = false;
  /// Whether y is x and no step runs, in training or in evaluation; nullptr: never.
  bool (*is_identity)(const void* options, bool training) = nullptr;
  /// y is x rounded by a quantizer of the recipe. The options are ops::QuantizeOptions.
  bool is_quantize_point = false;
  /// The number of groups in which operands with a role are quantized; nullptr: no groups. Each
  /// group has slots of its own in a recipe's state, those of the first group first.
  size_t (*groups)(const void* options) = nullptr;
  /// The forward consists of differentiable operations.
  bool has_composite = true;
  /// Returns the length of a list operand. An op with lists needs it.
  size_t (*list_length)(const void* options, std::string_view operand) = nullptr;
  /// Replaces `signature.parse` where the struct of options differs from what a user writes. Throws
  /// c10::ValueError for a bad option.
  Options (*parse)(const OpDef& definition, const OptionValues& options) = nullptr;
};

/// Returns the index of a name in a list, or npos.
inline constexpr size_t npos = static_cast<size_t>(-1);
inline size_t position(std::span<const std::string_view> names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return i;
  return npos;
}
inline bool is_list(std::string_view name) { return name.ends_with("[]"); }

/// The meaning of a name in a definition: an operand or result, by its index in OpKind::operands,
/// or the gradient of one.
struct OperandRef {
  size_t operand = 0;
  bool is_gradient = false;
  bool operator==(const OperandRef&) const = default;
};

/// A step with resolved names.
struct OpStep {
  const StepDef* def = nullptr;
  std::vector<OperandRef> reads, writes, mutates, absorbs;
  struct ContractOf {
    OperandRef operand;
    Direction along;
    Role role;
    bool (*by_group)(const void* options) = nullptr;
    bool (*keeps_numbers)(const void* options) = nullptr;
  };
  std::vector<ContractOf> contracts;
  /// Indices of the values that link a pattern: x and y, in backward grad_y and grad_x; npos where
  /// the step has none.
  size_t main_read = npos, main_write = npos;
};

/// A registered op: its definition with every name resolved. Passes of the planner use nothing
/// else.
struct TANDEM_API OpKind {
  explicit OpKind(const OpDef& definition);

  const OpDef& def;
  /// Inputs, params, buffers, results, temporaries.
  Names operands;
  size_t first_param = 0, first_buffer = 0, first_result = 0, first_temporary = 0;
  std::vector<OpStep> forward, backward;
  std::optional<OpStep> in_place;
  std::vector<size_t> extra_outputs, indices;
  struct SameOperand {
    size_t name, operand;
  };
  /// A result, and the operand that it is.
  std::vector<SameOperand> same;
  /// An operand, and the result whose gradient is the operand's gradient.
  std::vector<SameOperand> same_gradients;
  std::vector<size_t> reemits, reemit_reads;

  const ResultDef& result(size_t operand) const { return def.results[operand - first_result]; }
  bool is_result(size_t operand) const {
    return operand >= first_result && operand < first_temporary;
  }
  bool is_same(size_t result) const;
  /// Resolve a name in the reads, or the writes, of a step or of a fusion; nullopt for an unknown
  /// name.
  std::optional<OperandRef> read(std::string_view name, bool backward) const;
  std::optional<OperandRef> write(std::string_view name, bool backward) const;
};

/// Returns the op of this name. Throws c10::ValueError, with a list of all names, for an unknown
/// one.
TANDEM_API const OpKind& op_kind(std::string_view name);
/// Returns the definition of the op of this name.
inline const OpDef& op_def(std::string_view name) { return op_kind(name).def; }

/// Returns the number of extra inputs of an op with these options.
TANDEM_API size_t extra_input_count(const OpDef& definition, const void* options);

/// The numbers of tensors that a recipe quantizes for an op with these options. A recipe with a
/// state keeps an amax for each.
struct SlotCount {
  int64_t forward = 0, backward = 0;
};
TANDEM_API SlotCount quantize_slots(const OpDef& definition, const void* options);
TANDEM_API SlotCount quantize_slots(const OpDef& definition, const OptionValues& options);

/// Adds a definition, which must outlive every plan.
///
/// Throws:  c10::ValueError where the name is taken; where reads, writes, mutates, same or reemits
///          name an unknown operand; where a name is declared twice, has two meanings in backward,
///          or is a list before an operand that is no list; where a name is empty or contains '.'
///          or '|', by which patterns join the names of ops and steps; where a backward step is
///          named "forward"; where another op of the family has other options or steps.
TANDEM_API void register_op(const OpDef& definition);

/// Returns all registered names in alphabetical order.
TANDEM_API std::vector<std::string> op_names();

namespace detail {
struct OpRegistration {
  explicit OpRegistration(const OpDef& definition) { register_op(definition); }
};
}  // namespace detail

/// Registers a definition when its library is loaded.
#define TANDEM_REGISTER_OP(definition) \
  static const ::tandem::detail::OpRegistration tandem_op_registration_##definition { definition }

}  // namespace tandem
