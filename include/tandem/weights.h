// Codes of weights for those who call products without a pipeline: kept by the caller, made again
// where the weight has changed.
#pragma once

#include "kernel_ops/weights.h"
#include "tandem/export.h"

namespace tandem {

using kernel_ops::CodesWere;
using kernel_ops::quantize_weight;
using kernel_ops::Said;
using kernel_ops::WeightCodes;

/// While one of these lives, this thread says that nobody has written the weights that its
/// pipelines use since their codes were made (Said::unchanged): their bytes are not compared.
///
///   { tandem::WeightsUnchanged unchanged; loss = model->forward(x).sum(); }
class WeightsUnchanged {
 public:
  WeightsUnchanged() { kernel_ops::say(Said::unchanged); }
  ~WeightsUnchanged() { kernel_ops::say(before_); }
  WeightsUnchanged(const WeightsUnchanged&) = delete;
  WeightsUnchanged& operator=(const WeightsUnchanged&) = delete;

 private:
  Said before_ = kernel_ops::said_now();
};

}  // namespace tandem
