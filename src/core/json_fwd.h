// Declares nlohmann::json, so that programs that register ops without reading JSON need none of its
// headers.
#pragma once

#if __has_include(<nlohmann/json_fwd.hpp>)
#include <nlohmann/json_fwd.hpp>
#else
namespace nlohmann {
class json;
}
#endif
