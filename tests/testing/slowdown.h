#pragma once

// How much longer things may take where they run under a sanitizer: for time limits of tests that wait for work.
namespace k3::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowdown = 10;
#else
constexpr int kSlowdown = 1;
#endif

}  // namespace k3::testing
