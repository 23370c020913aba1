// Op definitions: one table entry per kind of operation. What the planner knows of an op is here
// and nowhere else.
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

/// Runs one step: reads its operands from the call, writes the results that are demanded.
using Run = void (*)(Call& call);

/// Names of operands, in the order in which a step sees them. A gradient is called grad_<name>. One
/// that ends in [] is a list, whose length the op's options say; in the reads and writes of a step
/// lists stand last.
using Names = std::vector<std::string_view>;

/// The dtype in which an op computes and returns its results.
enum class DtypeRule : uint8_t {
  /// That of autocast, else that of the first parameter: products and norms.
  weight,
  /// That of autocast, else that of the input: activations.
  input,
  /// As torch promotes the operands: sums.
  promote,
  /// As torch promotes the input with a number that has a fraction: integers become the default
  /// dtype.
  promote_number,
};

/// A result of an op.
struct ResultDef {
  enum Kind : uint8_t {
    /// In the op's dtype.
    computed,
    /// float32 (float64 where the op's dtype is).
    statistic,
    /// In the op's dtype, float32 where that is float16: a sum over rows that may be large.
    large,
    /// int64, drawn before the op runs, in list order.
    seed,
    /// The sizes of the input.
    shape,
    /// What user code saved.
    opaque,
  };
  std::string_view name;
  Kind kind = computed;
  /// Of a computed one: its dtype whatever the op's is; Undefined: the op's.
  at::ScalarType dtype = at::ScalarType::Undefined;
};

/// `name` is the same value as `operand`: a rename, no step. For results; and for gradients of
/// operands.
struct Same {
  std::string_view name, operand;
};

/// What a step does with the clock: a collective is one that starts it and one that waits for it,
/// and others may stand between.
enum class Phase : uint8_t { start, compute, wait };

/// An operand of a product that a step reads, and the dimension of it that the product sums over: a
/// recipe gives it codes whose blocks lie that way.
struct Contract {
  std::string_view operand;
  Direction along;
  /// Whether a step of an op with these options is given plain numbers, and quantizes them itself
  /// in groups, which have scales of their own; nullptr: never.
  bool (*by_group)(const void* options) = nullptr;
  /// Whether backward of an op with these options quantizes the operand again, from its numbers,
  /// rather than have codes kept; nullptr: never.
  bool (*keeps_numbers)(const void* options) = nullptr;
};

/// One step of an op, forward and backward alike. It runs if any of its writes is demanded, or if
/// it mutates what is not the library's own.
struct StepDef {
  /// "forward", "backward", or what it writes where an op has several.
  std::string_view name;
  /// Operands and results by their names, gradients as grad_<result>.
  Names reads;
  /// Results; in backward gradients as grad_<operand>, then results that it can write again
  /// (`reemits`).
  Names writes;
  /// Buffers; an extra input where the user asked for it.
  Names mutates = {};
  /// Gradients of parameters that go into what the step mutates and nowhere else: it runs where one
  /// of them is asked for.
  Names absorbs = {};
  /// Products: what of the reads a recipe may quantize. Each has a role.
  std::vector<Contract> contracts = {};
  Phase phase = Phase::compute;
  /// Of backward: writes results again for a step behind it, from what it reads, which holds no
  /// gradient. The library gives it one as its last read, "behind", so that no compiler takes the
  /// step for that of forward.
  bool writes_again = false;
  Run run = nullptr;
  /// Whether an op with these options has the step; nullptr: always.
  bool (*applies)(const void* options) = nullptr;
};

/// What an operand of products is to a recipe; a step that multiplies by it names it in
/// `contracts`.
struct RoleOf {
  std::string_view operand;
  Role role;
};

/// What an op is: data, no behaviour of its own but the functions that run.
struct OpDef {
  std::string_view name;
  std::string_view formula;
  /// What patterns may ask for instead of a name, or empty. The ops of a family have the same
  /// struct of options, and steps of the same names, reads and writes.
  std::string_view family = {};
  /// The options.
  Signature signature = {};
  /// What shapes of `params` are made of.
  std::vector<SizeDef> sizes = {};
  /// The main input, then the extra ones.
  Names inputs = {"x"};
  /// How many of the last ones an op with these options has not; nullptr: none.
  size_t (*absent_inputs)(const void* options) = nullptr;
  /// Extra inputs that count, point or turn: never cast, without a gradient.
  Names indices = {};
  /// Extra inputs that are read in their own dtype: booleans, or numbers that are added to scores.
  Names masks = {};
  std::vector<ParamDef> params = {};
  /// The last of `params`: read without a gradient, and without a say in dtypes.
  size_t fixed_params = 0;
  /// Tensors of the caller that steps mutate; passed with every call.
  Names buffers = {};
  /// The main output first.
  std::vector<ResultDef> results = {{"y"}};
  /// Results that are outputs besides the main one.
  Names extra_outputs = {};
  /// What a step of backward writes for another one.
  Names temporaries = {};
  DtypeRule dtype = DtypeRule::input;
  /// Results that are an operand.
  std::vector<Same> same = {};
  /// Gradients of operands that are the gradient of a result.
  std::vector<Same> same_gradients = {};
  std::vector<RoleOf> roles = {};
  std::vector<StepDef> forward = {};
  std::vector<StepDef> backward = {};
  /// Results that a backward step can write again while it reads its inputs.
  Names reemits = {};
  /// Operands that it reads only then.
  Names reemit_reads = {};
  /// Ordered: what `saved_tensors` means to Python.
  Names context = {};
  /// y is a reshape of x, whose memory it may share.
  bool views_input = false;
  /// y may be larger than x, which is broadcast then.
  bool broadcasts_input = false;
  /// Instead of `forward` where the user asked for it: writes y into the memory of the extra input,
  /// which it mutates.
  std::optional<StepDef> in_place = {};
  /// Runs as the body of a torch.autograd.Function does, and its values are never reused.
  bool runs_user_code = false;
  /// In evaluation y is x.
  bool training_only = false;
  /// y is x behind a quantizer of the recipe; options are ops::QuantizeOptions.
  bool is_quantize_point = false;
  /// How many groups there are, where what has a role is quantized in groups: each has slots of its
  /// own in a recipe's state, those of the first group before those of the second. nullptr: none.
  size_t (*groups)(const void* options) = nullptr;
  /// The forward is made of differentiable operations.
  bool has_composite = true;
  /// The length of a list operand. Needed where there are lists.
  size_t (*list_length)(const void* options, std::string_view operand) = nullptr;
  /// Instead of `signature`, where options are not what a user wrote. Throws c10::ValueError on a
  /// bad one.
  Options (*parse)(const OpDef& definition, const nlohmann::json& options) = nullptr;
};

/// Position of a name in a list, or npos.
inline constexpr size_t npos = static_cast<size_t>(-1);
inline size_t position(std::span<const std::string_view> names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return i;
  return npos;
}
inline bool is_list(std::string_view name) { return name.ends_with("[]"); }

/// What a name in a definition refers to: an operand or result, by its place in OpKind::operands,
/// or the gradient of one.
struct OperandRef {
  size_t operand = 0;
  bool is_gradient = false;
  bool operator==(const OperandRef&) const = default;
};

/// A step with its names resolved.
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
  /// Places of what chains go through: x and y, in backward grad_y and grad_x; npos where the step
  /// has none.
  size_t main_read = npos, main_write = npos;
};

/// A registered op: its definition with every name resolved. All that passes decide by.
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
  /// a result and the operand that it is.
  std::vector<SameOperand> same;
  /// An operand and the result whose gradient is its own.
  std::vector<SameOperand> same_gradients;
  std::vector<size_t> reemits, reemit_reads;

  const ResultDef& result(size_t operand) const { return def.results[operand - first_result]; }
  bool is_result(size_t operand) const {
    return operand >= first_result && operand < first_temporary;
  }
  bool is_same(size_t result) const;
  /// In the reads and writes of a step of either direction, also of a fusion: nullopt for a name
  /// that is none.
  std::optional<OperandRef> read(std::string_view name, bool backward) const;
  std::optional<OperandRef> write(std::string_view name, bool backward) const;
};

/// The op of this name; throws c10::ValueError that lists the names there are.
TANDEM_API const OpKind& op_kind(std::string_view name);
/// Its definition.
inline const OpDef& op_def(std::string_view name) { return op_kind(name).def; }

/// How many extra inputs an op with these options has.
TANDEM_API size_t extra_input_count(const OpDef& definition, const void* options);

/// How many tensors a recipe quantizes for an op with these options: a recipe with a state keeps so
/// many amaxes.
struct SlotCount {
  int64_t forward = 0, backward = 0;
};
TANDEM_API SlotCount quantize_slots(const OpDef& definition, const void* options);
/// The same of options as JSON; empty: those that there are without any.
TANDEM_API SlotCount quantize_slots(const OpDef& definition, std::string_view options);

/// Adds a definition, which must outlive every plan. Throws c10::ValueError if the name is taken or
/// the definition contradicts itself: an unknown operand in reads, writes, mutates, same or
/// reemits, a name declared twice, one that means two things in backward, or a list before an
/// operand that is none; if a name is empty or has a '.' or '|' in it, as patterns join the names
/// of op and step by these, or a step of backward is called "forward"; if another op of its family
/// has other options or steps.
TANDEM_API void register_op(const OpDef& definition);

/// All registered names, sorted.
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
