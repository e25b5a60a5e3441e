#include "server/trace_context.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

constexpr char kTrace[] = "0af7651916cd43dd8448eb211c80319c";
constexpr char kParent[] = "b7ad6b7169203331";

std::string Header(const std::string& flags) { return std::string("00-") + kTrace + "-" + kParent + "-" + flags; }

TEST(TraceContextTest, ContinuesATraceWithASpanOfItsOwn) {
  const TraceContext context = ContinueTrace(Header("01"), false);
  EXPECT_EQ(context.trace_id, kTrace);
  EXPECT_EQ(context.parent_id, kParent);
  EXPECT_NE(context.span_id, kParent);
  EXPECT_TRUE(context.sampled);
  EXPECT_EQ(context.Header(), std::string("00-") + kTrace + "-" + context.span_id + "-01");
  EXPECT_EQ(context.LogField(), std::string(" trace=") + kTrace);
  EXPECT_FALSE(ContinueTrace(Header("00"), true).sampled);
  EXPECT_TRUE(ContinueTrace(Header("0b"), true).sampled);
  // What comes out may go in again.
  EXPECT_EQ(ContinueTrace(context.Header(), false).parent_id, context.span_id);
}

TEST(TraceContextTest, ALaterVersionMayBeLonger) {
  std::string header = Header("01");
  EXPECT_FALSE(ContinueTrace(header + "-more", false).active());
  header[1] = '7';
  EXPECT_TRUE(ContinueTrace(header + "-more", false).active());
  EXPECT_FALSE(ContinueTrace(header + "more", false).active());
}

TEST(TraceContextTest, WhatIsNoHeaderIsNotThere) {
  for (const std::string& bad :
       {std::string(), std::string("00"), std::string(55, '-'), std::string(55, '0'), Header("0"), Header("zz"),
        "ff" + Header("01").substr(2), "0A" + Header("01").substr(2),
        "00-00000000000000000000000000000000-" + std::string(kParent) + "-01",
        "00-" + std::string(kTrace) + "-0000000000000000-01", Header("01\n"), std::string(10000, 'a')}) {
    EXPECT_FALSE(ContinueTrace(bad, false).active()) << bad.substr(0, 80);
    const TraceContext begun = ContinueTrace(bad, true);
    EXPECT_EQ(begun.trace_id.size(), 32u);
    EXPECT_TRUE(begun.parent_id.empty());
    EXPECT_TRUE(begun.sampled);
  }
  EXPECT_EQ(TraceContext().Header(), "");
}

}  // namespace
}  // namespace k3
