// Headers that most sources of the program include, and that take seconds to parse.
#pragma once

#include <ATen/core/Tensor.h>
#include <tandem/tandem.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
