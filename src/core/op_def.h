// Op definitions: one table entry per kind of operation. What the planner knows of an op is here and nowhere else.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/value.h"
#include "tandem/export.h"

namespace tandem {

class Call;

/// Runs one step: reads its operands from the call, writes the results that are demanded.
using Run = void (*)(Call& call);

/// Names of operands, in the order in which a step sees them. A gradient is called grad_<name>.
using Names = std::vector<std::string_view>;

/// Options of an op as its own struct, made from JSON once per plan.
using Options = std::shared_ptr<const void>;

/// The dtype in which an op computes and returns its results.
enum class DtypeRule : uint8_t {
  weight,          ///< that of autocast, else that of the first parameter: products and norms
  input,           ///< that of autocast, else that of the input: activations
  promote,         ///< as torch promotes the operands: sums
  promote_number,  ///< as torch promotes the input with a number that has a fraction: integers become the default dtype
};

/// A result of an op.
struct ResultDef {
  enum Kind : uint8_t {
    computed,   ///< in the op's dtype
    statistic,  ///< float32 (float64 where the op's dtype is)
    seed,       ///< int64, drawn before the op runs, in list order
    shape,      ///< the sizes of the input
    opaque,     ///< what user code saved
  };
  std::string_view name;
  Kind kind = computed;
};

/// `name` is the same value as `operand`: a rename, no step. For results; and for gradients of operands.
struct Same {
  std::string_view name, operand;
};

/// One step of an op's backward. It runs if any of its writes is demanded.
struct BackwardStepDef {
  std::string_view name;  ///< "backward", or what it writes where an op has several
  Names reads;            ///< operands and results by their names, gradients as grad_<result>
  Names writes;  ///< gradients as grad_<operand>, then results that it can write again (`reemits`)
  Run run = nullptr;
};

/// An operand of a product, which a recipe quantizes.
struct RoleOf {
  std::string_view operand;
  Role role;
};

/// What an op is: data, no behaviour of its own but the functions that run.
struct OpDef {
  std::string_view name;
  std::string_view formula;
  /// What patterns may ask for instead of a name, or empty. The ops of a family have the same options, reads and writes.
  std::string_view family = {};
  Names inputs = {"x"};  ///< the main input, then the extra ones
  Names params = {};
  size_t buffers =
      0;  ///< the last of `params`: read without a gradient, and without a say in dtypes
  std::vector<ResultDef> results = {{"y"}};  ///< the main output first
  Names extra_outputs = {};                  ///< results that are outputs besides the main one
  DtypeRule dtype = DtypeRule::input;
  std::vector<Same> same = {};  ///< results that are an operand
  std::vector<Same> same_gradients =
      {};  ///< gradients of operands that are the gradient of a result
  std::vector<RoleOf> roles = {};
  Run forward = nullptr;
  std::vector<BackwardStepDef> backward = {};
  Names reemits = {};  ///< results that a backward step can write again while it reads its inputs
  Names reemit_reads = {};   ///< operands that it reads only then
  Names context = {};        ///< ordered: what `saved_tensors` means to Python
  bool views_input = false;  ///< y is a reshape of x, whose memory it may share
  Run forward_in_place =
      nullptr;  ///< writes y into the extra input's own memory, where the user asked for it
  bool runs_user_code =
      false;  ///< runs as the body of a torch.autograd.Function does, and its values are never reused
  bool training_only = false;  ///< in evaluation y is x
  bool is_quantize_point =
      false;  ///< y is x behind a quantizer of the recipe; options are ops::QuantizeOptions
  bool has_composite = true;  ///< the forward is made of differentiable operations
  Options (*parse)(const nlohmann::json& options) =
      nullptr;  ///< throws c10::ValueError on an unknown or bad option
  /// Instead of `parse`, where options depend on the definition that they are for.
  Options (*parse_for)(const OpDef& definition, const nlohmann::json& options) = nullptr;
};

/// The definition with this name; throws c10::ValueError that lists the names there are.
TANDEM_API const OpDef& op_def(std::string_view name);

/// Adds a definition, which must outlive every plan. Throws c10::ValueError if the name is taken or the definition contradicts itself:
/// an unknown operand in reads, writes, same or reemits, a name declared twice, or one that means two things in backward.
TANDEM_API void register_op(const OpDef& definition);

/// All registered names, sorted.
TANDEM_API std::vector<std::string> op_names();

/// Position of a name in a list, or npos.
inline constexpr size_t npos = static_cast<size_t>(-1);
inline size_t position(std::span<const std::string_view> names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return i;
  return npos;
}

/// What a name in the backward of an op refers to: an operand or result, or the gradient of one.
struct OperandRef {
  std::string_view name;
  bool is_gradient = false;
};

/// In the reads of a backward step: an operand or a result, else grad_<result>; nullopt for any other name.
TANDEM_API std::optional<OperandRef> backward_read(const OpDef& definition, std::string_view name);
/// In the writes of a backward step: a result of `reemits`, else grad_<operand>; nullopt for any other name.
TANDEM_API std::optional<OperandRef> backward_write(const OpDef& definition, std::string_view name);

namespace detail {
struct OpRegistration {
  explicit OpRegistration(const OpDef& definition) { register_op(definition); }
};
}  // namespace detail

/// Registers a definition when its library is loaded.
#define TANDEM_REGISTER_OP(definition) \
  static const ::tandem::detail::OpRegistration tandem_op_registration_##definition { definition }

}  // namespace tandem
