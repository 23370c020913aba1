// Steps: calls of implementations. A list of them is a program over values.
#pragma once

#include <string>
#include <vector>

#include "core/op_def.h"
#include "core/value.h"

namespace tandem {

/// A part of an op: its forward (nth 0) or its nth backward step (from 1). Every part is covered exactly once.
struct Part {
  uint16_t op = 0;
  uint16_t nth = 0;
  auto operator<=>(const Part&) const = default;
};

/// One call of an implementation.
struct Step {
  std::string
      kind;  ///< what patterns match: "rms_norm", "rms_norm.backward", "add", "quantize"; the fusion's name where fused
  std::string family;  ///< the second name that patterns match, or empty
  Run run = nullptr;
  Names read_names, write_names;  ///< as the definition calls them, parallel to reads and writes
  Values reads;                   ///< Value::none for an operand that is absent
  Values writes;                  ///< Value::none for a result that nobody demands
  Values
      mutates;  ///< workspaces and in-place operands: such steps are never dropped, repeated or reordered
  std::vector<Part> covers;
  std::vector<Options>
      options;  ///< one per op that the step covers, in op order; one for a quantize step
  bool runs_user_code = false;
  Values dead;  ///< values whose last reader this step is
};
using Steps = std::vector<Step>;

inline bool reads(const Step& step, Value value) {
  for (const Value v : step.reads)
    if (v == value && exists(v)) return true;
  return false;
}
inline bool writes(const Step& step, Value value) {
  for (const Value v : step.writes)
    if (v == value && exists(v)) return true;
  return false;
}

}  // namespace tandem
