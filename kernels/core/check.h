#pragma once

#include <cstdio>
#include <cstdlib>

// For our own broken invariants only; anything that a client or a file can cause is a Status. Prints and aborts.
#define K3_CHECK(condition)                                                              \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)
